"""Beyond one machine, on Ray: replicas behind one server, and files of prompts over all of them.

The only folder that imports ray (the extra `ray`). Ray places processes, tells of their deaths, and
takes HTTP in; events go from replica to server by a connection of their own, one message a step.

Tests under another name:
`front`, `replica`: `tests/e2e/test_cluster.py`.
"""
