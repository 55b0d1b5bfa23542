"""The language model: prefill in chunks, the decode batch, M-RoPE, the last layer."""
