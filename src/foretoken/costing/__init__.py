"""Step costs and the choice of gamma.

The seconds of a step by its size (`costs`) are measured on the pair (`probe`) and stored on disk
(`stored_costs`), together with the load of the machine (`contention`). `gamma` chooses the number
of draft tokens from these costs and the acceptance so far.
"""
