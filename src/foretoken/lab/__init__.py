"""The laboratory: agreement and costs of a pair, measured, certified, compared and shown.

It runs pairs as a user does. It takes no part in generation and knows no command line.
"""
