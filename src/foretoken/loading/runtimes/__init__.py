"""One module per backend: `refusal` returns why it cannot run a model, `build` the running model;
`place` tries them in a fixed order."""
