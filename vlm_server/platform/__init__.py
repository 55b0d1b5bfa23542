"""The operating system: memory, processes, folders, libraries."""
