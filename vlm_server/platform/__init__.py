"""What depends on the operating system: memory, processes, folders, libraries."""
