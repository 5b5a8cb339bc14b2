"""Draft models with another tokenizer than the target's: the two vocabularies, the translation of
sequences between them, and a model that has the target's vocabulary as its interface."""
