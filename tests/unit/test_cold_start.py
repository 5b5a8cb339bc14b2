"""What a command imports before it knows that it has something to do: asserted on modules, not on
seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import foretoken
from cold import HEAVY, modules
from tiny import byte_level, folder, llama

COMMANDS = (
    "generate",
    "chat",
    "bench",
    "certify",
    "doctor",
    "drafts",
    "train",
)


def test_help_and_version_import_nothing_heavy():
    calls = [(), ("--help",), ("--version",), *((name, "--help") for name in COMMANDS)]
    for (code, names, _), call in zip(modules(*calls), calls, strict=True):
        assert code == (0 if call else 2)
        assert names & {*HEAVY, "numpy", "huggingface_hub"} == set(), call


MISTAKES = {
    ("generate", "hi", "--temperature", "-1"): "temperature is -1.0",
    ("chat", "--top-p", "2"): "top_p is 2.0",
    ("chat", "-q", "hi", "--target", "no-such-folder"): "there is no folder 'no-such-folder'",
    ("chat", "-q", "hi", "--url", "http://127.0.0.1:9"): "cannot be reached",
    ("generate", "hi", "--seed", "-1"): "seed is -1",
    ("generate", "hi", "--dtype", "float31"): "dtype is 'float31'",
    ("generate", "hi", "--runtime", "onyx"): "runtime is 'onyx'",
    ("generate", "hi", "--target", "no-such-folder"): "there is no folder 'no-such-folder'",
    ("generate", "--prompt-file", "no-such-file"): "no-such-file cannot be read",
    ("generate", "hi", "--stop", ""): "stop_strings holds ''",
    ("generate", "hi", "--logit-bias", "x"): "logit_bias is 'x', which is not valid JSON",
    ("generate", "hi", "--min-new-tokens", "99"): "min_new_tokens=99 is above max_new_tokens=64",
    ("generate", "hi", "--system", "S"): "--system needs messages",
    ("chat", "--temprature", "1"): "--temprature; did you mean --temperature? ",
    ("generate", "hi", "--max-tokens", "2"): "--max-tokens; did you mean --max-new-tokens? ",
    ("serve", "--tensor-parallel-size", "2"): "a model on one device; foretoken serve",
    ("bench", "--prompts", "no-such-file"): "no-such-file cannot be read",
    ("bench", "--prompts", "P", "--top-k", "-1"): "top_k is -1",
    ("bench", "--prompts", "P", "--out", "no-such-folder/b.json"): "there is no folder no-such",
    ("bench", "--prompts", "P", "--gamma", "2,x"): "gamma is '2,x'",
    ("certify", "--rule", "nonsense"): "rule is 'nonsense'",
    ("certify", "--target", "no-such-folder"): "there is no folder",
}


def test_mistakes_are_told_before_torch_is_imported(tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nb\n")
    calls = [tuple(str(prompts) if part == "P" else part for part in call) for call in MISTAKES]
    for (code, names, said), call in zip(modules(*calls), MISTAKES, strict=True):
        assert code == 2 and said.startswith("error: ") and MISTAKES[call] in said, said
        assert names & {"torch", "transformers", "native"} == set(), call


def test_the_http_process_imports_no_torch():
    """What crosses the pipe to the engine's process is plain data, and read without torch."""
    code = "import foretoken.server.run, sys; print({'torch', 'transformers'} & {*sys.modules})"
    environment = os.environ | {"PYTHONPATH": str(Path(foretoken.__file__).parents[1])}
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, env=environment, text=True, capture_output=True, check=True)
    assert process.stdout == "set()\n"


def test_a_model_brings_no_families_but_its_own():
    """Keys of the auto classes are the configs of all families: to ask for them takes seconds."""
    code = """
import sys
from foretoken.loading.named_models import get_asset
from foretoken.loading.sources import find_source, load_tokenizer

find_source(get_asset("target"), None, False)
load_tokenizer(get_asset("target"), None, False)
families = {name.split(".")[2] for name in sys.modules if name.startswith("transformers.models.")}
assert len(families) < 20, sorted(families)
"""
    environment = os.environ | {"PYTHONPATH": str(Path(foretoken.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


AGAIN = """
import json, sys
import foretoken

spec = foretoken.load(sys.argv[1], sys.argv[2], runtime="native")
(done,) = spec.generate("the day", max_new_tokens=8, gamma=2, temperature=1.0)
print(json.dumps([done.tokens, done.text, spec.target.runtime, sorted(sys.modules)]))
"""


@pytest.mark.prove
@pytest.mark.cpu_only
def test_a_kept_conversion_is_loaded_without_what_makes_networks(tmp_path):
    """Its facts say all that must be known, and the tokenizer's class is remembered."""
    for name, layers in (("target", 2), ("draft", 1)):
        folder(tmp_path / name, llama(320, num_hidden_layers=layers, head_dim=16), byte_level())
    environment = os.environ | {"PYTHONPATH": str(Path(foretoken.__file__).parents[1])}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", AGAIN, tmp_path / "target", tmp_path / "draft"]
    found = []
    for _ in range(2):
        process = subprocess.run(command, env=environment, text=True, capture_output=True)
        assert not process.returncode, process.stderr[-2000:]
        found.append(json.loads(process.stdout.splitlines()[-1]))
    (*first, before), (*second, names) = found
    assert first == second and first[2] == "native"
    heavy = {"transformers.modeling_utils", "transformers.models", "torch._dynamo"}
    assert heavy <= set(before) and not heavy & set(names)
