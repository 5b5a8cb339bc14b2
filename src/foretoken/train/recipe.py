"""Settings of a training run that all kinds of drafts share, and checks of their values."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.errors import InputError


@dataclass(frozen=True, slots=True)
class TrainingRecipe:
    """Length, batch size, learning rate and schedule of a training run."""

    steps: int = 2000
    batch: int = 8
    learning_rate: float = 3e-3
    warmup: int = 100
    decay: float = 0.25
    seed: int = 0
    save_every: int = 100
    patience: int = 0  # stop after this many measurements without improvement; 0: never
    bfloat16: bool = False  # autocast; weights and sums stay in float32

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "save_every"):
            require_positive(name, getattr(self, name))
        if not 0 < self.learning_rate <= 1e30:  # its steps must be finite in float32
            raise InputError(f"learning_rate is {self.learning_rate}; give a number in (0, 1e30]")
        for name in ("warmup", "patience"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)}; give 0 or more")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed is {self.seed}; give an integer in [0, 2**63)")


def require_positive(name: str, value: int) -> None:
    """Raise InputError for a count below 1."""
    if value < 1:
        raise InputError(f"{name} is {value}; give 1 or more")


def require_share(name: str, value: float) -> None:
    """Raise InputError for a fraction outside [0, 1]."""
    if not 0 <= value <= 1:
        raise InputError(f"{name} is {value}; give a share in [0, 1]")
