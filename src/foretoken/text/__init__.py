"""Between ids and text: decoding, a row's text up to its end, messages through a chat template."""
