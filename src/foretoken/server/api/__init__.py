"""OpenAI's protocol: the fields of requests, and the answers of each endpoint."""
