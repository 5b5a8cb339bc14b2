"""`foretoken doctor` of the processor, and `foretoken doctor --speed`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from console import Run, mistake
from foretoken.lab import machine, speed
from foretoken.lab.speed import LinearStack, PrecisionSpeed
from foretoken.loading import fastest
from foretoken.models import families


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, console: Run) -> Run:
    monkeypatch.setattr(machine, "READ_BYTES", 2**20)
    monkeypatch.setattr(families, "FAMILIES", {})
    return console


def test_what_the_processor_can_do_and_how_fast_it_reads(run: Run) -> None:
    document: dict[str, Any] = json.loads(run("doctor", "--json").out)["processor"]
    assert document["name"] and document["threads"] >= 1 and document["bytes_per_second"] > 0
    shown = run("doctor").out
    assert f"processor: {document['name']}, {document['threads']} threads" in shown
    assert " GB/s, reading 1 MiB" in shown
    assert all(name in shown for name in document["abilities"] or ())


@pytest.mark.openvino
def test_the_fastest_precision_of_every_size(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {
        ("int4", "onnx"): (0.001, 0.004),
        ("int8", "openvino"): (0.002, 0.003),
        ("bfloat16", "openvino"): None,
        ("float32", "onnx"): (0.2, 0.3),
    }
    rows = [PrecisionSpeed(10_000_000, *way, seconds) for way, seconds in times.items()]
    kept = {
        "label": "Llama, 64 wide, in int8",
        "rows": 16,
        "seconds": {"onnx": [0.1], "openvino": [0.2]},
    }
    sizes = [{"rows": r, "tokens": n} for r, n in ((16, 1), (16, 4), (1, 64))]
    monkeypatch.setattr(fastest, "measured", lambda: [kept])
    monkeypatch.setattr(speed, "speeds", lambda stacks: iter(rows))
    monkeypatch.setattr("foretoken.costing.contention.share", lambda spans: 0.23)
    shown = run("doctor", "--speed")
    one, other, eight, _ = (line for line in shown.out.splitlines() if "10M" in line)
    assert "1.00" in one and "-" in one and one.split()[2::5] == ["onnx", "int4"]
    assert "200" in one and "4.00" in eight and other.split()[2::5] == ["openvino", "int8"]
    assert "Llama, 64 wide, in int8, some layers over 16 x 1, 16 x 4, 1 x 64 tokens" in shown.out
    assert "openvino 200 ms" in shown.out
    assert shown.out.count("other processes took 23%") == 1
    document = json.loads(run("doctor", "--speed", "--json").out)
    assert document["tokens"] == [1, 8] and document["others"] == 0.23
    row = {"parameters": 10**7, "dtype": "bfloat16", "runtime": "openvino", "seconds": None}
    assert document["speeds"][2] == row and document["runtimes"] == [kept | {"passes": sizes}]


@pytest.mark.openvino
def test_it_is_measured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "STACKS", (LinearStack(64, 1),))
    monkeypatch.setattr(speed, "ENOUGH", 0.0)
    document = json.loads(run("doctor", "--speed", "--json").out)["speeds"]
    assert len(document) == len(speed.WAYS) and all(len(each["seconds"]) == 2 for each in document)


def test_without_openvino_it_says_so(run: Run) -> None:
    mistake(run("doctor", "--speed"), "OpenVINO cannot be used")
    mistake(run("doctor", "a", "--speed"), "--speed is of this machine; give it or 'a'")
