"""The engine's process, and the HTTP process's end of the pipe to it.

The HTTP process runs `client`, `fleet` (several clients), `generation` (a request's outputs) and
`statistics`, none of which imports torch. `messages` defines the data on the pipe. `client` starts
the engine's process, which runs the other modules.
"""
