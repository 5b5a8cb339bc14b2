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
from console import Run
from foretoken.errors import InputError
from foretoken.loading import gguf, hub, sources
from foretoken.loading.facts import ModelFacts
from foretoken.loading.sources import source
from foretoken.loading.target import TargetEnds
from foretoken.storage.cache import forget
from gguf_file import write_gguf
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


@pytest.mark.parametrize("tied", [True, False])
def test_ends_are_read_without_the_rest(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tiny.gguf"
    model = llama(320, hidden_size=64, intermediate_size=96, tie_word_embeddings=tied)
    write_gguf(file, model, byte_level(), GGMLQuantizationType.Q4_0)
    read = source(file, None, False)
    whole = read.network(torch.float32, torch.device("cpu"))
    monkeypatch.delattr(TargetEnds, "network")
    ends = TargetEnds(ModelFacts(read), None)
    assert torch.equal(ends.embedding.weight, whole.get_input_embeddings().weight)
    assert torch.equal(ends.head, whole.get_output_embeddings().weight)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_file(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, llama(320, hidden_size=64, intermediate_size=96), byte_level(), kind)
    network = source(file, None, False).network(torch.float32, torch.device("cpu"))
    stock: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32
    )
    ids = torch.arange(1, 40)[None]
    with torch.inference_mode():
        assert torch.equal(network(ids).logits, stock(ids).logits)


def test_commands_take_it(folder: Path, console: Run) -> None:
    file = str(folder / "tiny.gguf")
    shown = console(
        "generate", "It was", "--target", file, "--draft", "none", "--max-new-tokens", 2
    )
    assert shown.code == 0, shown.err
    gone = console("generate", "It was", "--target", str(folder / "gone.gguf"))
    assert gone.code == 2 and "gone.gguf cannot be read: No such file" in gone.err


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
    forget()
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
    model = llama(323, hidden_size=64, intermediate_size=96)
    write_gguf(tmp_path / "tiny.gguf", model, tokenizer, ends=fields)
    assert foretoken.load(tmp_path, "none", runtime="transformers").ends.eos == ends


def test_a_turns_end_that_is_a_plain_word_ends_nothing(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["<|im_end|>"])  # a normal token of the file
    model = llama(323, hidden_size=64, intermediate_size=96)
    write_gguf(tmp_path / "tiny.gguf", model, tokenizer)
    assert foretoken.load(tmp_path, "none", runtime="transformers").ends.eos == {0}


def test_a_changed_file_has_its_own_tokenizer(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "tiny.gguf"
    for V in (320, 300):
        write_gguf(file, llama(V, hidden_size=64, intermediate_size=96), byte_level(V))
        assert len(gguf.tokenizer(file, sources._tokenizer)) == V


def test_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "no.gguf"
    file.write_bytes(b"not a model")
    with pytest.raises(InputError, match="no.gguf is no GGUF file, though it is named so"):
        foretoken.load(file)
    with pytest.raises(InputError, match="missing.gguf cannot be read: No such file"):
        foretoken.load(tmp_path / "missing.gguf")


def test_a_file_that_is_cut_off_is_refused(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "tiny.gguf").read_bytes()
    for length in (len(whole) - 5000, 400):
        cut = tmp_path / f"{length}.gguf"
        cut.write_bytes(whole[:length])
        with pytest.raises(InputError) as raised:
            foretoken.load(cut, "lookup", runtime="transformers")
        assert "\n" not in str(raised.value) and f"{length}.gguf" in str(raised.value)


def test_several_files_in_a_folder_are_named(folder: Path, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(folder / "tiny.gguf", tmp_path / name)
    with pytest.raises(InputError, match=r"several GGUF files \(a.gguf, b.gguf\)"):
        foretoken.load(tmp_path)


def test_a_part_is_refused(folder: Path, tmp_path: Path) -> None:
    part = tmp_path / "m-00001-of-00002.gguf"
    shutil.copy(folder / "tiny.gguf", part)
    with pytest.raises(InputError, match="one of several parts"):
        hub.gguf(part)


def test_one_part_of_one_is_whole(folder: Path, tmp_path: Path) -> None:
    whole = tmp_path / "m-00001-of-00001.gguf"
    shutil.copy(folder / "tiny.gguf", whole)
    assert hub.gguf(whole) == whole == hub.gguf(tmp_path)
    spec = foretoken.load(whole, "none", runtime="transformers")
    assert len(spec.generate([5, 6], max_new_tokens=2)[0].tokens) == 2


def test_a_file_has_no_revision(folder: Path) -> None:
    with pytest.raises(InputError, match="is a file, which has none"):
        foretoken.load(folder / "tiny.gguf", revision="main")


def test_missing_packages_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs gguf and accelerate.*foretoken\[gguf\]"):
        foretoken.load(folder)


def test_a_file_of_the_hub_is_named_with_its_model() -> None:
    with pytest.raises(InputError, match=r"nobody/nothing:a.gguf cannot be had from the hub"):
        foretoken.load("nobody/nothing:a.gguf")


def test_a_damaged_tokenizer_in_the_cache_is_made_again(folder: Path, cache: Path) -> None:
    file = folder / "tiny.gguf"
    words = len(gguf.tokenizer(file, sources._tokenizer))
    (kept,) = (cache / "foretoken" / "gguf").iterdir()
    (kept / "tokenizer.json").write_text("{")
    assert len(gguf.tokenizer(file, sources._tokenizer)) == words
    assert len(gguf.tokenizer(file, sources._tokenizer)) == words
