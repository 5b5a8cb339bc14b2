"""The engine's own process, and the HTTP process's end of the pipe to it.

The HTTP process runs `client`, `fleet` (several of these), `generation` (a request's outputs) and
`statistics`; none of them imports torch. `messages` are the data on the pipe. `client` starts the
engine's process, which runs all the others.
"""
