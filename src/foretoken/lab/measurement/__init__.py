"""A measured pair: its file, how it is made, and the draft and gamma that it recommends.

Knows no command line; plans are made from files alone, without models.
"""
