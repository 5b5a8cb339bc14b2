"""The engine's own process, and the HTTP process's end of the pipe to it.

Only `worker` and `sandbox` run in the engine's process, and only there torch is imported.
`messages` are the data on the pipe; `client` is the HTTP process's end of it, `fleet` several of
these as one, `generation` a request's texts, and `statistics` the rates of all of them.
"""
