"""The HTTP APIs, a folder for each: schema, parsing, rendering, errors; and what they share."""
