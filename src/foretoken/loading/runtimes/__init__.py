"""One module per backend: `find_refusal` returns why it cannot run a model, `build` builds it;
`place` tries them in a fixed order."""
