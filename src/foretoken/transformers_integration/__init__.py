"""Integration with transformers' `generate`: the conversion of its calls to requests, and of their
outputs to its own."""
