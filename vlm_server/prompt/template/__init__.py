"""Chat templates: conversations arranged by a template's traits, and rendered in a sandbox."""
