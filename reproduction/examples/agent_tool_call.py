"""An agent's step: the likely tool already runs while a large classifier still chooses the tool.

f is a large network that reads a request and gives the distribution of the tool to call, q a small
one, g the call: a subprocess that computes, or searches or counts in the files of foretoken. Both
networks are trained here, in a second, on the same requests. Where the choice turns out to be
another tool, the call that was begun is killed; tools are chosen by f's distribution all the same.

    python -m reproduction.examples.agent_tool_call [--requests 100] [--guesses 1] [--network 0]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from zlib import crc32

import numpy as np

import foretoken
from reproduction.examples import measured
from reproduction.execute import Execution, speculate

FILES = str(Path(foretoken.__file__).parent)
READ = f"import pathlib; files = [p.read_text() for p in pathlib.Path({FILES!r}).rglob('*.py')]; "
TOOLS = {  # what each runs for a request's two words
    "calculate": "print(sum(ord(c) for c in '{0}') * sum(ord(c) for c in '{1}'))",
    "search": READ + "print(sum('{0}' in f or '{1}' in f for f in files))",
    "count": READ + "print(sum(f.count('{0}') + f.count('{1}') for f in files))",
}
ASKED = {  # templates, and the tools that were called for such requests
    "multiply the value of {0} by that of {1}": ["calculate"],
    "what is {0} times {1}": ["calculate", "calculate", "count"],
    "in which files are {0} and {1} mentioned": ["search"],
    "look for {0} or {1}": ["search", "search", "count"],
    "how often do {0} and {1} occur": ["count"],
    "how many {0} and {1} are there": ["count", "search", "calculate"],
}
WORDS = "gamma beta alpha draft target token law row step cache prefix sample cost model".split()


def requests(rng: np.random.Generator, n: int) -> list[tuple[str, str, list[str]]]:
    """Text, tool and the two words of n requests."""
    questions = []
    for template in rng.choice(list(ASKED), n):
        words = rng.choice(WORDS, 2).tolist()
        questions.append((template.format(*words), str(rng.choice(ASKED[template])), words))
    return questions


class Classifier:
    """Hashed trigrams, `width` random features of them, and a trained layer to the tools."""

    def __init__(self, hashes: int, width: int, seed: int) -> None:
        weights = np.random.default_rng(seed).standard_normal((hashes, width), dtype=np.float32)
        self.hidden, self.hashes = weights, hashes
        self.out = np.zeros((width, len(TOOLS)))

    def features(self, texts: list[str]) -> np.ndarray:
        counts = np.zeros((len(texts), self.hashes), dtype=np.float32)
        for row, text in zip(counts, texts, strict=True):
            for i in range(len(text) - 2):
                row[crc32(text[i : i + 3].encode()) % self.hashes] += 1
        hidden = np.maximum(counts @ self.hidden, 0)
        return hidden / np.linalg.norm(hidden, axis=1, keepdims=True)

    def train(self, texts: list[str], tools: list[str], steps: int = 400) -> None:
        """Logistic regression on the features, by gradient descent."""
        features = self.features(texts)
        labels = np.array([[tool == name for name in TOOLS] for tool in tools], dtype=float)
        for _ in range(steps):
            self.out += 10 * features.T @ (labels - self._distribution(features)) / len(texts)

    def __call__(self, text: str) -> dict[str, float]:
        return dict(zip(TOOLS, self._distribution(self.features([text]))[0].tolist(), strict=True))

    def _distribution(self, features: np.ndarray) -> np.ndarray:
        scores = features @ self.out
        weights = np.exp(scores - scores.max(1, keepdims=True))
        return weights / weights.sum(1, keepdims=True)


def choose(large: Classifier, network: float, text: str) -> dict[str, float]:
    """f, as far away as `network` seconds."""
    time.sleep(network)
    return large(text)


def call(words: list[str], network: float) -> Callable[..., str]:
    """g for a request: run the tool in a process of its own, killed once it is not wanted."""

    def g(tool: str, cancelled) -> str:
        cancelled.wait(network)
        command = [sys.executable, "-I", "-S", "-c", TOOLS[tool].format(*words)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            while process.poll() is None:
                if cancelled.wait(0.001):
                    process.kill()
            return process.communicate()[0].strip()

    return g


def answer(
    questions: list, f: Callable, q: Callable, guesses: int, network: float
) -> list[Execution]:
    return [
        speculate(f, call(words, network), q, text, guesses=guesses, seed=i)
        for i, (text, _, words) in enumerate(questions)
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--guesses", type=int, default=1, help="tools that are called ahead")
    parser.add_argument("--width", type=int, default=16384, help="of the large network")
    parser.add_argument("--network", type=float, default=0.0, help="ms to f and to g, added")
    least = {"requests": 1, "guesses": 0, "width": 1, "network": 0}
    options = measured.options(parser, arguments, least)
    rng = np.random.default_rng(0)
    texts, tools, _ = zip(*requests(rng, 300), strict=True)
    large, small = Classifier(2048, options.width, 1), Classifier(64, 32, 2)
    for classifier in (large, small):
        classifier.train(list(texts), list(tools))
    questions = requests(rng, options.requests)
    network = options.network / 1000
    f = partial(choose, large, network)
    plain = answer(questions, f, small, 0, network)
    runs = answer(questions, f, small, options.guesses, network)
    for (text, _, _), run in list(zip(questions, runs, strict=True))[:3]:
        state = "had begun" if run.kept is not None else f"{run.guesses[0]} had begun"
        print(f"{text}? {run.y} ({state}): {run.value}")
    print(measured.report(plain, runs))


if __name__ == "__main__":
    main()
