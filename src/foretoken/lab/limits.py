"""Limits of measurements, checked before models are loaded, without importing torch."""

from __future__ import annotations

from foretoken.errors import InputError


def require(gamma: int, max_new_tokens: int, prompts: int, draft: str | None) -> None:
    """InputError where these options cannot be measured with."""
    if gamma < 1:
        raise InputError(f"gamma is {gamma}; give 1 or more to measure a draft")
    if max_new_tokens < 2:
        raise InputError(f"max_new_tokens is {max_new_tokens}; give 2 or more")
    if prompts < 2:
        raise InputError(f"{prompts} prompt; give 2 or more, intervals are over prompts")
    if draft == "none":
        raise InputError("draft is none; give one that guesses")
