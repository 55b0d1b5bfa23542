"""Takes the images and videos of a request: base64, headers, SHA-256. Decodes no pixel."""
