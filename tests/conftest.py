"""Shared by all tests: no network, one thread a worker, no time limit on hypothesis examples."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("foretoken", deadline=None)  # two busy cores make times meaningless
settings.load_profile("foretoken")
