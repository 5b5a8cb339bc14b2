"""A file for each backend: why it cannot run a model (`refusal`), and the model that runs on it
(`build`); `place` tries them in a fixed order."""
