"""Between transformers' `generate` and a Speculator: what it hands to a decoding method, and what
it gets back."""
