"""Integration with transformers' `generate`: converts calls of `generate` to requests, and the
outputs of the requests to the output of `generate`."""
