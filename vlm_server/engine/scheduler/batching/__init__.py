"""How much goes into one call: tokens, pictures, prompts; learned from measured times."""
