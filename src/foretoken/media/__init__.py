"""Images and audio of a prompt: loaded from files, and passed to a model as inputs."""

# Outputs of a tokenizer; anything else in a processor's output belongs to media
TEXT_INPUTS = frozenset(
    "input_ids attention_mask token_type_ids special_tokens_mask length offset_mapping".split()
)
# Outputs that no model takes: here, the number of the audio to which each window belongs
IGNORED_INPUTS = frozenset({"audio_chunk_index"})
