"""Pictures and sounds of a prompt: read from files, and as inputs of a model."""

# What a tokenizer returns, which says nothing beside the ids
TEXT_INPUTS = frozenset(
    "input_ids attention_mask token_type_ids special_tokens_mask length offset_mapping".split()
)
# What processors tell themselves: which sound each of their windows is of
IGNORED_INPUTS = frozenset({"audio_chunk_index"})
