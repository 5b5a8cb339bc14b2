"""`foretoken serve` as a process: it answers, ends in order, and names mistakes before it loads."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest

from console import Run, mistake
from foretoken.measurement.plan import BENCH_FILE_FORMAT
from served import pair, until


def test_names_and_speculation_reach_the_server(
    console: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An empty name is none; vLLM's JSON stands in place of draft, gamma and rule."""
    target, _ = pair(tmp_path)
    served: list[Any] = []
    monkeypatch.setattr("foretoken.server.run.run", lambda *made: served.append(made))
    config = '{"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "block"}'
    asked = (target, "--served-model-name", "", "--speculative-config", config)
    assert console("serve", *asked).code == 0
    ((setups, options),) = served
    ((name, setup),) = setups.items()
    assert name == "target" and not setup.adapters and setup.loading["adapter"] is None
    assert options.name == "target" and options.gamma == 3
    assert setup.draft == "lookup" and setup.engine["rule"] == "block"


def test_a_benchmark_is_served_as_it_was_measured(
    console: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where nothing else is given; what is must be the same."""
    target, _ = pair(tmp_path)
    adapter, file = tmp_path / "lora", tmp_path / "b.json"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (adapter / "adapter_model.safetensors").touch()
    load = {"target": str(target), "draft": "lookup", "dtype": "int8"}
    load |= {"adapter": str(adapter), "generation_config": "ignore"}
    how = {"gamma": None, "rule": "coupled", "temperature": 1, "top_k": 0, "top_p": 1}
    best = {"draft": "lookup", "gamma": 4, "speedup": 2, "certain": True, "tried": "lookup"}
    best |= {"load": load, "generate": how}
    file.write_text(json.dumps({"format": BENCH_FILE_FORMAT, "best": best}))
    served: list[Any] = []
    monkeypatch.setattr("foretoken.server.run.run", lambda *made: served.append(made))
    for given in ((), (target,), (f"{target}/", "--dtype", "int8")):
        result = console("serve", *given, "--speculative-config", file)
        assert result.code == 0
        flags = f"--adapter {adapter} --ignore-generation-config"
        assert all(word in result.err for word in ("options of the benchmark: ", *flags.split()))
        ((setups, options),) = served
        setup = served.clear() or setups["target"]
        assert {n: setup.loading[n] for n in load if n not in ("target", "draft")}.items() <= (
            load.items()
        )
        assert options.gamma is None and setup.draft == "lookup"
        assert setup.engine["rule"] == "coupled" and str(setup.target).rstrip("/") == str(target)
    for given, said in (
        (("--dtype", "int4"), "--dtype is 'int4', but the benchmark of --speculative-config"),
        (("--runtime", "native"), "--runtime is 'native', but .* used 'auto'"),
        (("elsewhere",), "--target is 'elsewhere', but .* used '/"),
        (
            ("--rule", "block", "--gamma", 2),
            "give either --speculative-config or those options",
        ),
    ):
        result = console("serve", *given, "--speculative-config", file)
        mistake(result, "error: ")
        assert re.search(said, result.err)


@pytest.fixture
def adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with folders that look like adapters, whose weights nobody reads here."""
    for name in ("one", "two", "two=2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        (tmp_path / name / "adapter_model.safetensors").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("given", "base", "others"),
    [
        (["{}/one"], "{}/one", {}),
        (["~/one"], "{}/one", {}),
        (["fast={}/one", "tidy=~/two"], None, {"fast": "{}/one", "tidy": "{}/two"}),
        (["{}/two=2"], "{}/two=2", {}),  # a folder's own name
        (["a={}/two=2"], None, {"a": "{}/two=2"}),
    ],
)
def test_adapters_are_merged_into_the_target_or_served_by_name(
    console: Run,
    monkeypatch: pytest.MonkeyPatch,
    adapters: Path,
    given: list[str],
    base: str | None,
    others: dict[str, str],
) -> None:
    served: list[Any] = []
    monkeypatch.setattr("foretoken.server.run.run", lambda *made: served.append(made))
    flags = [part for each in given for part in ("--adapter", each.format(adapters))]
    file = adapters / "serve.yaml"
    file.write_text(json.dumps({"adapter": given[0].format(adapters)}))
    for asked in (flags, ["--config", file])[: 1 + (len(given) == 1)]:
        assert console("serve", *asked).code == 0
        setups, _ = served.pop()
        loaded = {name: setup.loading["adapter"] for name, setup in setups.items()}
        places = {name: place.format(adapters) for name, place in others.items()}
        assert loaded == {"novels": base and base.format(adapters), **places}
        assert list(setups)[0] == "novels"  # the target, whose engine checks the others
        assert setups["novels"].adapters == (*places.values(),)


@pytest.mark.prove
def test_a_model_that_cannot_be_served(tmp_path: Path) -> None:
    """The server ends, and says why."""
    target, _ = pair(tmp_path)
    command = [sys.executable, "-m", "foretoken", "serve", target, "--draft", "none", "--port", "0"]
    command += ["--runtime", "transformers", "--kv-memory", "5"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert process.returncode == 2 and "error: kv_memory is 5 bytes" in process.stderr


def test_options_from_a_file(console: Run, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 70000\n")
    mistake(console("serve", "--config", file), "70000")
    file.write_text("log-format: xml\nport: 70000\n")
    mistake(console("serve", "--config", file, "--port", 8000), "'xml'")
    file.write_text("target: nowhere/at/all\napi-key: [a]\n")
    mistake(console("serve", "--config", file), "nowhere")
    for text, message in (
        ("prot: 1", "has the unknown option 'prot'; did you mean port?"),
        ("- a", "not a mapping"),
        ("a: [", "YAML"),
    ):
        file.write_text(text)
        mistake(console("serve", "--config", file), message)


def test_a_server_answers_and_ends_in_order(tmp_path: Path) -> None:
    target, draft = pair(tmp_path)
    command = [sys.executable, "-m", "foretoken", "serve", target, "--draft", draft]
    command += ["--runtime", "transformers", "--port", "0", "--served-model-name", "tiny"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--log-format", "json"], stderr=log)
    try:

        def address() -> str | None:
            match = re.search(r"http://127\.0\.0\.1:\d+", (tmp_path / "log").read_text())
            return match.group() if match else None

        until(address)
        url = str(address())
        until(lambda: httpx2.get(f"{url}/ready").status_code == 200)
        engine = httpx2.get(f"{url}/health").json()["engine"]
        sampling = {"prompt": "It", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx2.stream("POST", f"{url}/v1/completions", json=sampling, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert list(lines)[-2] == "data: [DONE]"  # what runs may end
        assert process.wait(30) == 0
    finally:
        process.kill()
    entries = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    (line,) = [each for each in entries if each["logger"] == "foretoken.requests"]
    assert line["status"] == 200 and line["completion_tokens"] == 400
    assert not Path(f"/proc/{engine}").exists()
