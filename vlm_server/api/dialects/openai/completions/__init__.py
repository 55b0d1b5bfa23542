"""`POST /v1/completions`, the legacy text completions."""
