"""Uploaded files, each known to one owner: in a folder, bounded in bytes and age. No HTTP."""
