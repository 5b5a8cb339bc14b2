"""The engine's process, and its client in the HTTP process; a pipe connects the two processes.

The HTTP process runs `client`, `fleet` (several clients), `generation` (a request's outputs) and
`statistics`, none of which imports torch. `client` starts the engine's process, which runs the
other modules. `messages` defines the data that the processes exchange.
"""
