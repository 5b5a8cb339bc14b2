"""What a model and a tokenizer are read from; nothing that is missing is made up."""

from __future__ import annotations

import json

import pytest
import torch

from foretoken.errors import InputError, RefusedError
from foretoken.loading.sources import (
    TOKENIZER_CLASSES_FILE,
    find_source,
    is_network,
    load_tokenizer,
)
from foretoken.storage.cache import load_cached_values, save_cached_value
from tiny import byte_level, folder, llama, metaspace


def test_a_source_reads_its_parts_when_they_are_needed(tmp_path):
    path = folder(tmp_path / "m", llama(64))
    (path / "config.json").rename(tmp_path / "config.json")
    with pytest.raises(InputError, match=r"holds no config\.json"):
        find_source(path, None, False)
    (path / "config.json").write_text("{")
    read = find_source(path, None, False)  # which reads nothing yet
    assert read.name == str(path) and not read.trust and read.list_custom_code() == []
    with pytest.raises(InputError, match="cannot be read as a model"):
        read.config  # noqa: B018
    (tmp_path / "config.json").rename(path / "config.json")
    assert read.commit is None and read.structure.device.type == "meta"
    network = read.load_network(torch.float64, torch.device("cpu"))
    assert network.dtype == torch.float64 and not network.training


def test_a_models_files(tmp_path):
    """Its weights wherever an index or the config points, its settings and its code; no others."""
    path = folder(tmp_path / "m", llama(64))
    (path / "notes.txt").touch()
    (path / "own.py").touch()
    (tmp_path / "beside.safetensors").touch()
    index = {"weight_map": {"a": "../beside.safetensors", "b": "missing.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    files = {file.resolve() for file in find_source(path, None, False).list_files() or ()}
    assert {tmp_path / "beside.safetensors", path / "own.py", path / "config.json"} <= files
    assert path / "model.safetensors" in files and path / "notes.txt" not in files
    config = json.loads((path / "config.json").read_text())
    for name in ("sub/w.safetensors", "sub/w.safetensors.index.json"):
        (path / "sub").mkdir(exist_ok=True)
        (path / name).write_text(json.dumps({"weight_map": {"a": "w.safetensors"}}))
        (path / "config.json").write_text(json.dumps(config | {"transformers_weights": name}))
        read = find_source(path, None, False).list_files() or ()
        assert path / name in read and path / "sub" / "w.safetensors" in read
    (path / "model.safetensors.index.json").write_text("[")  # loading reports it
    assert path / "model.safetensors" in (find_source(path, None, False).list_files() or ())
    (path / "adapter_config.json").write_text("{}")
    with pytest.raises(RefusedError, match="is an adapter"):
        find_source(path, None, False).list_files()


def test_where_there_is_no_tokenizer(tmp_path):
    path = folder(tmp_path / "m", llama(64))
    assert load_tokenizer(path, None, False) is load_tokenizer(llama(64), None, False) is None
    with pytest.raises(InputError, match="holds no tokenizer"):
        load_tokenizer(path, None, False, required=True)
    own = byte_level()
    assert load_tokenizer(own, None, False) is own
    assert is_network(llama(64)) and not is_network("m") and not is_network(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_a_tokenizer_whose_class_is_remembered_is_the_same(make, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder(tmp_path / "m", llama(400), make())
    first = load_tokenizer(tmp_path / "m", None, False)
    assert load_cached_values(TOKENIZER_CLASSES_FILE)
    with monkeypatch.context() as patch:
        patch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *args, **more: 1 / 0)
        second = load_tokenizer(tmp_path / "m", None, False)
    assert type(first) is type(second) and first.get_vocab() == second.get_vocab()
    assert first.special_tokens_map == second.special_tokens_map
    text = "It was the first day, naïve as ever."
    assert first(text).data == second(text).data
    assert first.decode(first(text).input_ids) == second.decode(second(text).input_ids)
    for key in load_cached_values(TOKENIZER_CLASSES_FILE):  # only what transformers made is run
        save_cached_value(TOKENIZER_CLASSES_FILE, key, "subprocess:Popen")
    assert type(load_tokenizer(tmp_path / "m", None, False)) is type(first)
