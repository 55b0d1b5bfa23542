"""Batches: files of requests that run while no other request does. No routes."""
