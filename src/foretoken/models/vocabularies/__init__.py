"""A draft model with another tokenizer than the target's: the two vocabularies, the translation of
sequences between them, and the model with the target's vocabulary as its interface."""
