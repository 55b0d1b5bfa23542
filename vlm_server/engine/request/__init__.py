"""One request: its states, its choices, and how tokens become text and end it."""
