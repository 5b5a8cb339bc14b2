"""Load on a server, measured from outside: when requests are sent, what one of them brings, and
what all of them come to.

Knows no HTTP: a request is whatever brings chunks of OpenAI's completions.
"""
