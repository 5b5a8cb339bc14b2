"""Measurement of what a pair gains here: its draft's agreement, its costs, speeds and predictions.

Runs pairs as a user does; takes no part in generation and knows no command line.
"""
