"""Integration with transformers' `generate`: converts its calls to requests, and the outputs of
these to the output of `generate`."""
