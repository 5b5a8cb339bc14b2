"""A draft model of another tokenizer than the target's: what its tokens are there, how it reads a
text in the target's ids, and what it would say, by the words that both have or by its text."""
