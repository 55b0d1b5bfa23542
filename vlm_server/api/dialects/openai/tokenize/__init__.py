"""`POST /v1/tokenize` and `POST /v1/detokenize`."""
