"""Pictures and sounds of a prompt: read from files, and as inputs of a model."""
