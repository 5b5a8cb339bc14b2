"""Models in GGUF files: the same values, words and template as transformers reads in them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM

import foretoken
from foretoken.errors import InputError
from foretoken.loading import gguf, hub, sources
from foretoken.loading.facts import ModelFacts
from foretoken.loading.sources import find_source
from foretoken.loading.target import TargetEmbeddings
from foretoken.storage.cache import clear_cached_values
from gguf_file import write_gguf
from loads import refused
from tiny import byte_level, llama

TEMPLATE = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
KINDS = [GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0]
KINDS += [GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q5_1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gguf")
    model = llama(320, hidden_size=64, intermediate_size=96)
    write_gguf(made / "tiny.gguf", model, byte_level(), template=TEMPLATE)
    return made


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def written(
    file: Path, tokenizer: Any = None, kind: Any = GGMLQuantizationType.Q8_0, **more: Any
) -> Path:
    """A file of a model of 323 output rows whose tokenizer has 320 ids."""
    model = llama(323, hidden_size=64, intermediate_size=96, **more.pop("shape", {}))
    write_gguf(file, model, tokenizer or byte_level(), kind, **more)
    return file


@pytest.mark.parametrize("tied", [True, False])
def test_ends_are_read_without_the_rest(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"tie_word_embeddings": tied}
    file = written(tmp_path / "tiny.gguf", kind=GGMLQuantizationType.Q4_0, shape=shape)
    read = find_source(file, None, False)
    whole = read.load_network(torch.float32, torch.device("cpu"))
    monkeypatch.delattr(TargetEmbeddings, "network")
    ends = TargetEmbeddings(ModelFacts(read), None)
    assert torch.equal(ends.embedding.weight, whole.get_input_embeddings().weight)
    assert torch.equal(ends.head, whole.get_output_embeddings().weight)


@pytest.mark.daily("Q4_0", "Q5_1")
@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_values_are_those_of_the_file(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    file = written(tmp_path / "tiny.gguf", kind=kind)
    network = find_source(file, None, False).load_network(torch.float32, torch.device("cpu"))
    stock: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32
    )
    ids = torch.arange(1, 40)[None]
    with torch.inference_mode():
        assert torch.equal(network(ids).logits, stock(ids).logits)


@pytest.mark.parametrize(
    "runtime", ["transformers", pytest.param("native", marks=pytest.mark.native)]
)
def test_texts_are_those_of_generate(folder: Path, runtime: str) -> None:
    spec = foretoken.load(folder / "tiny.gguf", "lookup", runtime=runtime)
    stock: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file="tiny.gguf")
    ids = torch.tensor([spec.tokenizer.encode("It was the first day")])
    whole = stock.generate(ids, max_new_tokens=30, do_sample=False)[0, ids.shape[1] :].tolist()
    for gamma in (0, 3):
        (completion,) = spec.generate(["It was the first day"], max_new_tokens=30, gamma=gamma)
        assert completion.tokens == whole


def test_messages_go_through_the_template_of_the_file(folder: Path, cache: Path) -> None:
    for _ in range(2):  # from the file, then from the cache
        spec = foretoken.load(folder, "none", runtime="transformers")
        (asked,) = spec.generate([[{"role": "user", "content": "It was"}]], max_new_tokens=5)
        (plain,) = spec.generate(["<It was>"], max_new_tokens=5)
        assert asked.tokens == plain.tokens
    (kept,) = (cache / "foretoken" / "gguf").iterdir()
    assert (kept / "tokenizer.json").exists()
    clear_cached_values()
    assert not kept.exists()


HARMONY = ["<|return|>", "<|call|>", "<|end|>"]


@pytest.mark.parametrize(
    ("fields", "words", "ends"),
    [
        ({"eos": 0, "eot": 320}, ["<|im_end|>"], {0, 320}),
        ({"eos": 0, "eot": 7, "eom": 9}, [], {0, 7, 9}),
        ({"eos": 0}, ["<|im_start|>", "<|im_end|>"], {0, 321}),
        ({"eos": 320}, ["</s>"], {0, 320}),  # the word of 0 is <|endoftext|>
        ({"eot": 5}, [], {0, 5}),  # and not 2, which LlamaConfig takes where nothing is named
        ({"eos": 320}, HARMONY, {0, 320, 321}),  # between a message's channels stands <|end|>
        ({"eos": 0}, HARMONY[2:], {0, 320}),
    ],
)
def test_a_text_ends_with_each_end_of_the_file(
    tmp_path: Path, fields: dict[str, int], words: list[str], ends: set[int]
) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": words})
    written(tmp_path / "tiny.gguf", tokenizer, ends=fields)
    assert foretoken.load(tmp_path, "none", runtime="transformers").ends.eos == ends


def test_a_turns_end_that_is_a_plain_word_ends_nothing(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["<|im_end|>"])  # a normal token of the file
    written(tmp_path / "tiny.gguf", tokenizer)
    assert foretoken.load(tmp_path, "none", runtime="transformers").ends.eos == {0}


def test_a_changed_file_has_its_own_tokenizer(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "tiny.gguf"
    for V in (320, 300):
        write_gguf(file, llama(V, hidden_size=64, intermediate_size=96), byte_level(V))
        assert len(gguf.load_tokenizer(file, sources._load_tokenizer)) == V


def test_files_that_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (folder / "tiny.gguf").read_bytes()
    for name, held in (("no", b"not a model"), ("cut", whole[:-5000]), ("head", whole[:400])):
        (tmp_path / f"{name}.gguf").write_bytes(held)
    part = tmp_path / "m-00001-of-00002.gguf"
    shutil.copy(folder / "tiny.gguf", part)
    refused(InputError, "no.gguf is not a GGUF file", tmp_path / "no.gguf")
    refused(InputError, "cut.gguf", tmp_path / "cut.gguf")
    refused(InputError, "head.gguf", tmp_path / "head.gguf")
    refused(InputError, "missing.gguf cannot be read: No such", tmp_path / "missing.gguf")
    refused(InputError, r"several GGUF files \(cut.gguf, head.gguf", tmp_path)
    refused(InputError, "nobody/nothing:a.gguf cannot be downloaded", "nobody/nothing:a.gguf")
    refused(InputError, "a file, which has no revision", folder / "tiny.gguf", revision="main")
    with pytest.raises(InputError, match="one of several parts"):
        hub.find_gguf(part)
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    refused(InputError, r"needs gguf and accelerate.*foretoken\[gguf\]", folder)


def test_one_part_of_one_is_whole(folder: Path, tmp_path: Path) -> None:
    whole = tmp_path / "m-00001-of-00001.gguf"
    shutil.copy(folder / "tiny.gguf", whole)
    assert hub.find_gguf(whole) == whole == hub.find_gguf(tmp_path)
    spec = foretoken.load(whole, "none", runtime="transformers")
    assert len(spec.generate([5, 6], max_new_tokens=2)[0].tokens) == 2


def test_a_damaged_tokenizer_in_the_cache_is_made_again(folder: Path, cache: Path) -> None:
    file = folder / "tiny.gguf"
    words = len(gguf.load_tokenizer(file, sources._load_tokenizer))
    (kept,) = (cache / "foretoken" / "gguf").iterdir()
    (kept / "tokenizer.json").write_text("{")
    assert len(gguf.load_tokenizer(file, sources._load_tokenizer)) == words
    assert len(gguf.load_tokenizer(file, sources._load_tokenizer)) == words
