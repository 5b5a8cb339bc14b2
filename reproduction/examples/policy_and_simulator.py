"""A policy and a simulator side by side: a pole is balanced on a cart.

f, the policy, looks ahead: it simulates every push in thousands of slightly different worlds, and
pushes more often what keeps the pole nearer to upright. q does the same with a few worlds and a
coarse time step. g is the world: a cloud of carts at a fine time step. While f is still looking
ahead, g already runs on the push that q takes to be likely; the pushes follow f's distribution all
the same.

    python -m reproduction.examples.policy_and_simulator [--steps 100] [--guesses 1] [--processes]
"""

from __future__ import annotations

import argparse
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np

from reproduction.examples import measured
from reproduction.execute import Execution, speculate

PUSHES = {"left": -10.0, "none": 0.0, "right": 10.0}  # newtons
UPRIGHT = np.zeros(4)  # place, speed, angle, speed of the angle
LOOK = 0.4  # seconds ahead
STEP = 0.02  # seconds that a push lasts
MANY, FEW = 4000, 3  # worlds that f and q look at
CARTS = 40_000
SHARPNESS = 50.0


def move(state: np.ndarray, force: float, seconds: float, dt: float) -> np.ndarray:
    """The equations of cart and pole (Barto, Sutton, Anderson 1983) for `[4, n]` at once."""
    place, speed, angle, turn = state
    for _ in range(round(seconds / dt)):
        sine, cosine = np.sin(angle), np.cos(angle)
        push = (force + 0.05 * turn * turn * sine) / 1.1
        twist = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine * cosine / 1.1))
        speed, turn = speed + dt * (push - 0.05 * twist * cosine / 1.1), turn + dt * twist
        place, angle = place + dt * speed, angle + dt * turn
    return np.stack([place, speed, angle, turn])


def look_ahead(state: np.ndarray, worlds: int, dt: float) -> dict[str, float]:
    """The distribution of the push: how far from upright each leaves the pole, on average over
    worlds."""
    noise = np.random.default_rng(worlds).normal(0, 0.02, (4, worlds))
    harm = []
    for force in PUSHES.values():
        after = move(state[:, None] + noise, force, STEP, STEP)
        later = move(after, 0.0, LOOK, dt)
        harm.append(float((later[2] ** 2 + 0.02 * later[0] ** 2).mean()))
    weights = np.exp(-SHARPNESS * (np.array(harm) - min(harm)))
    return dict(zip(PUSHES, (weights / weights.sum()).tolist(), strict=True))


def policy(state: np.ndarray) -> dict[str, float]:
    return look_ahead(state, MANY, 0.005)


def quick_policy(state: np.ndarray) -> dict[str, float]:
    return look_ahead(state, FEW, 0.02)


class World:
    """g: where a push takes the cart, as the mean of a cloud of carts in the wind."""

    def __init__(self, state: np.ndarray, seed: int) -> None:
        self.state, self.seed = state, seed

    def __call__(self, push: str, cancelled) -> np.ndarray:
        wind = np.random.default_rng(self.seed).normal(0, 0.01, (4, CARTS))
        cloud = self.state[:, None] + wind
        for _ in range(10):
            if cancelled.is_set():  # another push was drawn: nobody waits for this one
                break
            cloud = move(cloud, PUSHES[push], STEP / 10, STEP / 20)
        return cloud.mean(1)


def balance(steps: int, guesses: int, executor: Executor | None = None) -> list[Execution]:
    state, runs = UPRIGHT, []
    for step in range(steps):
        args = (policy, World(state, step), quick_policy, state)
        runs.append(speculate(*args, guesses=guesses, executor=executor, seed=step))
        state = runs[-1].value
    return runs


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="pushes")
    parser.add_argument("--guesses", type=int, default=1, help="pushes that are simulated ahead")
    parser.add_argument("--processes", action="store_true", help="processes in place of threads")
    options = measured.options(parser, arguments, {"steps": 1, "guesses": 0})
    kind = ProcessPoolExecutor if options.processes else ThreadPoolExecutor
    with kind(1 + options.guesses) as pool:
        balance(2, options.guesses, pool)  # the workers start
        plain = balance(options.steps, 0, pool)
        runs = balance(options.steps, options.guesses, pool)
    angle = np.degrees(runs[-1].value[2])
    print(f"after {len(runs)} pushes the pole is {angle:+.1f} degrees from upright")
    print(measured.report(plain, runs))


if __name__ == "__main__":
    main()
