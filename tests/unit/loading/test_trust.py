"""A model's own code runs only where the caller trusts it: never by an answer on standard input."""

from __future__ import annotations

import ast
import io
import json
from pathlib import Path

import pytest

import foretoken
from console import mistake
from foretoken.errors import InputError
from foretoken.measurement.footprint import compute_model_footprint
from loads import refused
from table import TableModel
from tiny import TEXT, byte_level, folder, llama

SOURCES = Path(foretoken.__file__).parent
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
CODE = """from pathlib import Path
Path({mark!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class OwnConfig(LlamaConfig):
    model_type = "own"
class Own(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Is there once the code has run; standard input says yes to all."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 100))
    modules = tmp_path / "modules"  # where the library copies code to
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    return tmp_path / "it-ran"


@pytest.fixture
def model(tmp_path: Path, mark: Path) -> Path:
    """A folder whose config, network and tokenizer are its own code's."""
    path = folder(tmp_path / "model", llama(320), byte_level())
    (path / "own.py").write_text(CODE.format(mark=str(mark)))
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    names |= {"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]}
    for name, changes in (
        ("config.json", {"model_type": "own", "auto_map": names}),
        ("tokenizer_config.json", {"tokenizer_class": "OwnTokenizer", "auto_map": names}),
    ):
        document = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(document | changes))
    return path


def test_a_folder_of_a_model(console, model, mark, tmp_path):
    refused(InputError, "cannot be read as a model", model, "none")
    plain = folder(tmp_path / "plain", llama(320))
    refused(InputError, "tokenizer .* cannot be read", plain, "none", tokenizer=model)
    mistake(console("doctor", model), "cannot be read as a model")
    table = TableModel(lambda text: [1.0], 1)
    table.runtime = "other"
    assert compute_model_footprint(table, str(model), "float32").parameters is None
    for value in ("False", "", 1, 0, None):
        says = "trust_remote_code is .*"
        refused(InputError, says, model, "none", trust_remote_code=value)
    assert not mark.exists()
    assert (
        compute_model_footprint(table, str(model), "float32", trust=True).parameters
        and mark.exists()
    )
    spec = foretoken.load(model, "none", trust_remote_code=True)
    assert type(spec.target.model).__name__ == "Own"


def test_trainers(console, model, mark, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(TEXT * 20, encoding="utf-8")
    text = ("--data", tmp_path / "text", "--out")
    draft = ("--shape", "num_hidden_layers=1")
    for args in (
        ("eagle", *text, tmp_path / "e", "--target", model),
        ("distill", *text, tmp_path / "d", "--target", model, *draft),
        ("distill", *text, tmp_path / "d", "--draft", model),
    ):
        mistake(console("train", *args), "cannot be read")
    assert not mark.exists()


def test_every_call_says_whom_it_trusts():
    """Of the classes that choose a class by what a folder says: left to themselves they ask."""
    seen, silent = 0, []
    for path in [*SOURCES.rglob("*.py"), *BENCHMARKS.rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if ".from_" in text else ():
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = ast.unparse(node.func.value).split(".")[-1]
            reads = node.func.attr in ("from_pretrained", "from_config")
            if reads and owner.lower().startswith("auto"):
                seen += 1
                arguments = {keyword.arg for keyword in node.keywords}
                if not {"trust_remote_code", None} & arguments:  # None: ** of them
                    silent.append(f"{path}:{node.lineno}")
    assert seen > 5 and not silent
