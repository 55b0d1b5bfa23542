"""One request: its states and choices, and how its tokens become text."""
