"""An answer's text: detokenized, and split into content, reasoning and tool calls."""
