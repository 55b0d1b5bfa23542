"""What clients speak, a folder for each dialect: its schema, parsing, rendering and errors."""
