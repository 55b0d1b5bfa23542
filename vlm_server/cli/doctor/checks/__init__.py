"""What the doctor looks at, one module for each kind."""
