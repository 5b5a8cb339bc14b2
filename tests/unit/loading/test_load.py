"""Loading: what becomes a Speculator, and the one line that everything else gets."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import AddedToken

import census
import foretoken
from foretoken.cli.option import PairLoadOptions
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.errors import ForetokenError, InputError, RefusedError
from foretoken.loading import hub, memory, named_models
from foretoken.loading import load as loading
from foretoken.loading.options import LOAD_OPTIONS, LoadKeywords, LoadOptions
from loads import PADDED, refused
from tiny import byte_level, folder, llama, metaspace, t5
from tiny_families import build

# What loads


def test_folders(pair, tmp_path):
    spec = foretoken.load(*pair)
    assert isinstance(spec.drafter, LMDrafter) and spec.tokenizer is not None
    assert (spec.target_name, spec.draft_name) == tuple(map(str, pair))
    assert spec.ends.eos == {0}
    for name, weight in llama(PADDED).state_dict().items():
        assert torch.equal(spec.target.model.state_dict()[name], weight)
    (completion,) = spec.generate("It was", max_new_tokens=8, gamma=2)
    (plain,) = foretoken.load(str(pair[0]), "none").generate("It was", max_new_tokens=8)
    assert completion.tokens == plain.tokens and completion.text == plain.text
    for dtype in ("float64", "bfloat16", "float16"):
        spec = foretoken.load(*pair, dtype=dtype)
        assert spec.target.model.dtype == spec.drafter.model.model.dtype == getattr(torch, dtype)
    spec = foretoken.load(*pair, draft_dtype="bfloat16")
    assert spec.target.model.dtype == torch.float32
    assert spec.drafter.model.model.dtype == torch.bfloat16
    half = folder(tmp_path / "half", llama(64).to(torch.bfloat16))
    assert foretoken.load(half, dtype="auto").target.model.dtype == torch.bfloat16


def test_models_in_memory_are_used_as_they_are():
    target, draft = llama(64).double(), llama(64, seed=1)
    spec = foretoken.load(target, draft)
    assert spec.target.model is target and spec.drafter.model.model is draft
    assert target.dtype == torch.float64 and spec.tokenizer is None
    assert spec.target_name == "LlamaForCausalLM"
    assert len(spec.generate([1, 2], max_new_tokens=5, gamma=2)[0].tokens) == 5


def test_a_model_in_memory_keeps_its_mode():
    """And its dropout plays no part."""
    for target in (llama(64, attention_dropout=0.5), t5(64, dropout_rate=0.5)):
        target.train()
        spec = foretoken.load(target, "lookup")
        assert all(module.training for module in target.modules())
        first, second = (spec.generate([3, 4, 3, 4], gamma=2, max_new_tokens=20) for _ in range(2))
        assert first[0].tokens == second[0].tokens
        assert all(module.training for module in target.modules())
        plain = foretoken.load(target.eval(), "none").generate([3, 4, 3, 4], max_new_tokens=20)
        assert plain[0].tokens == first[0].tokens


def test_a_tokenizer_from_elsewhere(bare, pair, monkeypatch):
    calls, original = [], loading.load_tokenizer
    record = lambda *a, **k: calls.append(a) or original(*a, **k)  # noqa: E731
    monkeypatch.setattr(loading, "load_tokenizer", record)
    monkeypatch.setattr(hub, "resolve_options", lambda *_: {})  # folders in place of the hub
    assert foretoken.load(bare, "none", revision="old").tokenizer is None
    spec = foretoken.load(bare, "none", tokenizer=pair[0], revision="old")
    assert spec.tokenizer.get_vocab() == byte_level().get_vocab()
    assert [revision for _, revision, _ in calls] == ["old", None]  # its own
    own = byte_level()
    assert foretoken.load(llama(PADDED), tokenizer=own).tokenizer is own


def test_encoder_decoders(tmp_path):
    target = folder(tmp_path / "t5", t5(330), metaspace())
    spec = foretoken.load(target, folder(tmp_path / "draft", t5(330, seed=1), metaspace()))
    assert spec.target.encoder_decoder and spec.ends.decoder_start == 1
    (completion,) = spec.generate("It was", max_new_tokens=9, gamma=3)
    plain = foretoken.load(target, "none").generate("It was", max_new_tokens=9)[0]
    assert completion.tokens == plain.tokens and completion.stats.drafted
    path = folder(tmp_path / "byt5", t5(384), transformers.ByT5Tokenizer())  # without a file
    (completion,) = foretoken.load(path, "none").generate("It was", max_new_tokens=4)
    assert isinstance(completion.text, str)


@pytest.mark.parametrize(
    "name",
    [
        "Qwen3_5ForConditionalGeneration",
        pytest.param("Lfm2VlForConditionalGeneration", marks=pytest.mark.prove),
        pytest.param("Qwen2VLForConditionalGeneration", marks=pytest.mark.prove),
    ],
)
def test_a_model_that_reads_pictures_too_writes_text_from_ids(tmp_path, name):
    model, prompts = census.build(name), [[3, 4, 5], [9, 8, 7, 7, 8, 9]]
    spec = foretoken.load(folder(tmp_path / "m", model), "lookup", runtime="transformers")
    completions = spec.generate(prompts, max_new_tokens=12, gamma=3)
    for prompt, found in zip(prompts, completions, strict=True):
        text = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert found.tokens == text[0, len(prompt) :].tolist()


# What ends a turn by the chat template


def with_template(end: str):
    """A tokenizer whose chat template ends turns so, with token 320."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(end, special=True)], special_tokens=True)
    tokenizer.chat_template = f"{{% for m in messages %}}{{{{ m.content }}}}{end}{{% endfor %}}"
    return tokenizer


def test_a_chat_ends_with_the_turns_end_of_its_template(tmp_path, console, caplog):
    """One that no vocabulary knows is warned about: it may stand within turns, too, before a
    call. One that the model names itself needs no word."""
    caplog.set_level("INFO", "foretoken")

    def told():
        records = [each for each in caplog.records if "ends turns" in each.message]
        caplog.clear()
        return [(each.levelname, each.message) for each in records]

    tokenizer = with_template("<|im_end|>")
    spec = foretoken.load(llama(PADDED), "lookup", tokenizer=tokenizer, runtime="transformers")
    assert spec.ends.eos == {0, 320}
    ((level, message),) = told()
    assert level == "INFO" and "'<|im_end|>'" in message
    likely = {"max_new_tokens": 9, "sequence_bias": [[[320], 1000.0]]}
    (reply,) = spec.generate([[{"role": "user", "content": "It was"}]], **likely)
    assert (reply.tokens, reply.finish_reason) == ([320], "stop")

    target = folder(tmp_path / "target", llama(PADDED), with_template("<|message_sep|>"))
    assert foretoken.load(target, "none", runtime="transformers").ends.eos == {0}
    ((level, message),) = told()
    assert level == "WARNING" and "(id 320)" in message
    shown = console("doctor", target, "--runtime", "transformers")
    assert shown.code == 0 and message in shown.out.replace("\n", " ")

    told()
    model = llama(PADDED)
    model.generation_config.eos_token_id = [0, 320]
    for end in ("<|im_end|>", "<|message_sep|>"):
        spec = foretoken.load(model, "none", tokenizer=with_template(end), runtime="transformers")
        assert spec.ends.eos == {0, 320} and not told()


# The generation config


@pytest.mark.parametrize(
    ("settings", "suggested"),
    [
        ({}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}),
        ({"do_sample": False, "temperature": 0.6}, {}),
        ({"temperature": 0.7, "top_p": 1.0}, {"temperature": 0.7}),
        ({"do_sample": True, "min_p": 0.1}, {"temperature": 1.0, "min_p": 0.1}),
    ],
)
def test_sampling_that_the_model_suggests(settings, suggested):
    model = llama(64)
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    assert foretoken.load(model, "none").suggested == suggested
    assert foretoken.load(model, "none", generation_config="ignore").suggested == {}


def test_a_suggestion_that_is_not_followed_is_said_once(caplog):
    model = llama(64, eos_token_id=None)
    model.generation_config.do_sample, model.generation_config.temperature = True, 0.6
    spec = foretoken.load(model, "none")
    list(spec.stream([1, 2], max_new_tokens=2, **spec.suggested))
    assert not caplog.records
    list(spec.stream([1, 2], max_new_tokens=2))
    spec.generate([1, 2], max_new_tokens=2, temperature=1.0)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "suggests temperature=0.6, " in record.getMessage()


def test_what_changes_the_distribution_and_is_not_followed_is_refused_by_name():
    """Which entries those are: tests/unit/test_generation_config.py."""
    target = llama(64)
    target.generation_config.num_beams = 4
    assert "generation_config='ignore'" in refused(RefusedError, "num_beams=", target)
    assert foretoken.load(target, generation_config="ignore").generate([1], max_new_tokens=2)


# What is refused: a model in a folder of which one file is otherwise, an argument, an option


def other(name: str, text: str | None = None, **settings: Any) -> Callable[[Path], Path]:
    """Write a model whose file of this name holds this text, or these entries beside its own."""

    def write(path: Path) -> Path:
        folder(path, llama(64))
        own = text if text is not None else json.dumps(_entries(path / name) | settings)
        (path / name).write_text(own, encoding="latin-1")
        return path

    return write


def _entries(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def changed(change: Callable[[Path], Any]) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        change(folder(path, llama(64)) / "model.safetensors")
        return path

    return write


def bert(path: Path) -> Path:
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=64, intermediate_size=32, **shape)
    return folder(path, transformers.BertForMaskedLM(config))


def vit(path: Path) -> Path:
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return folder(
        path, transformers.ViTModel(transformers.ViTConfig(intermediate_size=32, **shape))
    )


GENERATION, CONFIG, TOKENIZER = "generation_config.json", "config.json", "tokenizer_config.json"
OWN_CODE = '{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}'
FOLDERS: list[tuple[Callable[[Path], Any], type[ForetokenError], str]] = [
    (lambda path: path.mkdir() or path, InputError, "is an empty folder"),
    (lambda path: path / "missing", InputError, "is not a folder"),
    (bert, ForetokenError, "bert|Bert"),
    (lambda path: transformers.BertForMaskedLM.from_pretrained(bert(path)), RefusedError, "bert"),
    (vit, RefusedError, "is a vit model, neither causal nor encoder-decoder"),
    *((other(GENERATION, text), InputError, f"{GENERATION} cannot be read|eos_token_id='x'")
      for text in ('{"eos_token_id": 5,}', "{bad", "[]", '{"eos_token_id": "x"}', "\xff")),
    *((other(CONFIG, text), ForetokenError, "model")
      for text in ("{", "[]", '"text"', "{}", '{"model_type": "nothing"}')),
    (other(CONFIG, OWN_CODE), InputError, "cannot be read as a model"),  # which is not run
    (other(CONFIG, hidden_act="nosuch"), InputError, "cannot be built from its config: .*nosuch"),
    (other(CONFIG, intermediate_size=40), InputError,
     r"layers.0.mlp.down_proj.weight in shape .*\(32, 48\), but its config requires \(32, 40\)"),
    (changed(lambda file: file.write_bytes(file.read_bytes()[:1000])), InputError, "be loaded"),
    (changed(Path.unlink), InputError, "holds no weights"),
    (changed(lambda file: llama(64).model.save_pretrained(file.parent)), InputError,
     "holds no weights for lm_head.weight.*give a complete LlamaForCausalLM"),
    (other("tokenizer.json", "{"), InputError, "the tokenizer in .* cannot be read"),
    *((other(TOKENIZER, tokenizer_class=kind), InputError, "the tokenizer in .* cannot be read: ")
      for kind in ("LlamaTokenizer", "GPT2Tokenizer", "PreTrainedTokenizerFast")),
]  # fmt: skip


@pytest.mark.parametrize(("write", "kind", "says"), FOLDERS)
def test_folders_that_are_refused(tmp_path, write, kind, says):
    refused(kind, says, write(tmp_path / "model"))


MODEL = llama(64)
ARGUMENTS: list[tuple[list[Any], dict[str, Any], str]] = [
    (["no-such/model"], {}, "there is no folder 'no-such/model', and HF_HUB_OFFLINE"),
    (["no such thing!"], {}, "'no such thing!' is not a folder"),
    ([""], {}, "'' is not a folder"),
    (["a" * 5000], {}, "is not a folder; give a model's folder"),
    (["a\0b"], {}, "is not a folder; give a model's folder"),
    ([5], {}, "target is 5; give a folder, a hub id or a network"),
    ([torch.nn.Linear(2, 2)], {}, "target is Linear"),
    ([MODEL, "no-such"], {}, "there is no folder .no-such."),
    ([MODEL, "a" * 5000], {}, "is not a folder; give a model's folder"),
    ([MODEL, foretoken.Drafter], {}, "draft is <class .*Drafter'>; give a folder"),
    ([MODEL, LookupDrafter], {}, "draft is <class .*LookupDrafter'>; give a folder"),
    ([MODEL, 5], {}, "draft is 5"),
    ([MODEL], {"tokenizer": 5}, "tokenizer is 5; give a folder, a hub id or a tokenizer"),
    ([MODEL], {"tokenizer": "a" * 5000}, "the tokenizer in a+ cannot be read"),
    ([MODEL], {"tokenizer": "no-such"}, "the tokenizer in no-such cannot be read"),
    ([MODEL], {"device": None}, "device is None; give 'cpu'"),
    ([MODEL], {"device": "meta"}, "device 'meta' stores no values; give 'cpu'"),
    ([MODEL], {"dtype": torch.float32}, "dtype is torch.float32; give one of"),
    ([MODEL], {"generation_config": "skip"}, "generation_config is 'skip'"),
    ([MODEL], {"draft_taps": "states"}, "draft_taps is 'states'"),
    ([None], {"dytpe": "int8"}, "^dytpe is not an option of load; did you mean dtype?"),
    ([None], {"temperature": 0.5}, "^temperature is not an option of load; give it to generate"),
    (["no-such/model"], {"dtype": "half"}, "dtype is 'half'; give one of float32"),
    (["no-such/model"], {"device": "quantum"}, "device 'quantum' cannot be used"),
    (["no-such/model"], {"device": "cuda:99"}, "device 'cuda:99' cannot be used"),
]


def test_arguments_that_are_refused(bare):
    for args, options, says in ARGUMENTS:
        refused(InputError, says, *args, **options)
    refused(InputError, "holds no tokenizer", MODEL, tokenizer=bare)


def test_a_precision_that_a_model_cannot_run_in(tmp_path):
    """The self-check runs a copy in float32, which says nothing of float64."""
    says = "MixtralForCausalLM does not run in float64 on cpu: .*; give dtype='float32'"
    model = build("Mixtral")
    model.save_pretrained(tmp_path)
    refused(RefusedError, says, tmp_path, "none", dtype="float64")
    refused(RefusedError, says, tmp_path, tmp_path, runtime="transformers", draft_dtype="float64")
    refused(RefusedError, says, model.double(), "none")
    assert foretoken.load(model.float(), "none").generate([5, 6], max_new_tokens=2)


def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_read(monkeypatch, tmp_path):
    shape = {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, num_hidden_layers=32, **shape
    )
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()  # no weights at all
    monkeypatch.setattr(memory, "get_free_bytes", lambda device: 20 * 10**9)
    message = refused(RefusedError, "needs 35.3 GB", tmp_path)
    assert "32.1 GB of weights" in message and "20.0 GB are free on cpu" in message
    refused(InputError, "cannot be loaded", tmp_path, dtype="bfloat16")  # 16 GB would


def test_the_missing_default_pair_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(named_models, "files", lambda package: tmp_path)
    refused(InputError, "a model that ships is missing at .*target")


def test_bars_of_transformers_are_hidden_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """And shown again as they were, whatever comes of the load."""
    seen = list[bool]()
    bars = transformers.utils.logging
    monkeypatch.setattr(loading, "_load", lambda *_: seen.append(bars.is_progress_bar_enabled()))
    before = bars.is_progress_bar_enabled()
    try:
        for shown in (True, False):
            (bars.enable_progress_bar if shown else bars.disable_progress_bar)()
            loading.load("novels")
            assert bars.is_progress_bar_enabled() == shown
    finally:
        (bars.enable_progress_bar if before else bars.disable_progress_bar)()
    assert seen == [False, False]


def test_an_option_is_declared_once() -> None:
    """The signature of `load`, its docstring and the command line have it."""
    parameters = inspect.signature(foretoken.load).parameters
    assert [*parameters][2:] == [*LOAD_OPTIONS] == [*LoadKeywords.__annotations__]
    line = {field.name.removeprefix("ignore_") for field in fields(PairLoadOptions)}
    for name, option in LOAD_OPTIONS.items():
        assert option.help.endswith((".", "..."))
        assert parameters[name].default == getattr(LoadOptions(), name)
        assert f"{name}: {option.help}" in (inspect.getdoc(foretoken.load) or "")
        assert (name in line) == (option.panel is not None), name
