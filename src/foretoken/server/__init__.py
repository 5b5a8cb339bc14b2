"""OpenAI-compatible server: one process handles HTTP, another process runs the engine. The
processes exchange plain data over a pipe."""
