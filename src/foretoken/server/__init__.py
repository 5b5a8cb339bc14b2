"""OpenAI-compatible server: one process handles HTTP, another runs the engine; they exchange plain
data over a pipe."""
