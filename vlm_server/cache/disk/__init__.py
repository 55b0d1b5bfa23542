"""The disk cache: files of features and KV in a folder that engines share."""
