"""What an answer's text is made of: content, thoughts and tool calls."""
