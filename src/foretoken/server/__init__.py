"""OpenAI-compatible server: HTTP in one process, the engine in another, plain data between them."""
