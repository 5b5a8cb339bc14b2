"""One module per backend. Its function `find_refusal` returns why the backend cannot run a model,
`build` builds the model; `place` tries the backends in a fixed order."""
