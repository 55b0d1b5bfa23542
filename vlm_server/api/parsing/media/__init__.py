"""Images and videos of a request: base64, headers, SHA-256. No pixel is decoded here."""
