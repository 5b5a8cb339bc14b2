"""Tensor parallelism: one network's weights over several processes, on torch.

Rank 0 is the process that generates: engine, drafter and randomness are there alone. Each call of
the Model protocol is sent to the other ranks, which make the same call on their shards. Neither
step nor drafters know.

`part`, `follower`: `tests/unit/models/parallel/test_model.py`.
"""
