"""Loading: what becomes a Speculator, and the one line that everything else gets."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from tokenizers import AddedToken

import census
import foretoken
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.errors import ForetokenError, InputError, RefusedError
from foretoken.loading import hub, memory, named
from foretoken.loading import load as loading
from loads import PADDED, refused
from tiny import byte_level, folder, llama, metaspace, t5
from tiny_families import build

# What works


def test_folders(pair):
    spec = foretoken.load(*pair)
    assert isinstance(spec.drafter, LMDrafter) and spec.tokenizer is not None
    assert (spec.target_name, spec.draft_name) == tuple(map(str, pair))
    assert spec.ends.eos == {0}
    (completion,) = spec.generate("It was", max_new_tokens=8, gamma=2)
    (plain,) = foretoken.load(str(pair[0]), "none").generate("It was", max_new_tokens=8)
    assert completion.tokens == plain.tokens and completion.text == plain.text


def test_weights_are_the_folders_own(pair):
    target = foretoken.load(pair[0]).target
    for name, weight in llama(PADDED).state_dict().items():
        assert torch.equal(target.model.state_dict()[name], weight)


def test_models_in_memory_are_used_as_they_are():
    target, draft = llama(64).double(), llama(64, seed=1)
    spec = foretoken.load(target, draft)
    assert spec.target.model is target and spec.drafter.model.model is draft
    assert target.dtype == torch.float64 and spec.tokenizer is None
    assert spec.target_name == "LlamaForCausalLM"
    assert len(spec.generate([1, 2], max_new_tokens=5, gamma=2)[0].tokens) == 5


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_dtype(pair, dtype):
    spec = foretoken.load(*pair, dtype=dtype)
    assert spec.target.model.dtype == spec.drafter.model.model.dtype == getattr(torch, dtype)


def test_dtype_of_the_draft_and_auto(pair, tmp_path):
    spec = foretoken.load(*pair, draft_dtype="bfloat16")
    assert spec.target.model.dtype == torch.float32
    assert spec.drafter.model.model.dtype == torch.bfloat16
    half = folder(tmp_path / "half", llama(64).to(torch.bfloat16))
    assert foretoken.load(half, dtype="auto").target.model.dtype == torch.bfloat16


def test_a_tokenizer_from_elsewhere(bare, pair):
    assert foretoken.load(bare).tokenizer is None
    assert foretoken.load(bare, tokenizer=pair[0]).tokenizer.get_vocab() == byte_level().get_vocab()
    own = byte_level()
    assert foretoken.load(llama(PADDED), tokenizer=own).tokenizer is own
    refused(InputError, "holds no tokenizer", pair[0], tokenizer=bare)
    refused(InputError, "the tokenizer in no-such cannot be read", pair[0], tokenizer="no-such")


def test_an_encoder_decoder_folder(tmp_path):
    target = folder(tmp_path / "t5", t5(330), metaspace())
    spec = foretoken.load(target, folder(tmp_path / "draft", t5(330, seed=1), metaspace()))
    assert spec.target.encoder_decoder and spec.ends.decoder_start == 1
    (completion,) = spec.generate("It was", max_new_tokens=9, gamma=3)
    plain = foretoken.load(target, "none").generate("It was", max_new_tokens=9)[0]
    assert completion.tokens == plain.tokens and completion.stats.drafted


def test_a_tokenizer_from_elsewhere_has_its_own_revision(bare, pair, monkeypatch):
    calls, original = [], loading.tokenizer_of
    record = lambda *a, **k: calls.append(a) or original(*a, **k)  # noqa: E731
    monkeypatch.setattr(loading, "tokenizer_of", record)
    monkeypatch.setattr(hub, "way", lambda *_: {})  # folders in place of the hub
    foretoken.load(bare, "none", tokenizer=pair[0], revision="old")
    foretoken.load(bare, "none", revision="old")
    assert [revision for _, revision, _ in calls] == [None, "old"]


# What ends a turn by the chat template


def with_template(end: str, *, special: bool = True):
    """A tokenizer whose chat template ends turns so, with token 320."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(end, special=special)], special_tokens=special)
    tokenizer.chat_template = f"{{% for m in messages %}}{{{{ m.content }}}}{end}{{% endfor %}}"
    return tokenizer


def test_a_chat_ends_with_the_turns_end_of_its_template(caplog):
    tokenizer = with_template("<|im_end|>")
    caplog.set_level("INFO", "foretoken")
    spec = foretoken.load(llama(PADDED), "lookup", tokenizer=tokenizer, runtime="transformers")
    assert spec.ends.eos == {0, 320}
    (record,) = [each for each in caplog.records if "ends turns" in each.message]
    assert record.levelname == "INFO" and "'<|im_end|>'" in record.message
    likely = {"max_new_tokens": 9, "sequence_bias": [[[320], 1000.0]]}
    (reply,) = spec.generate([[{"role": "user", "content": "It was"}]], **likely)
    assert (reply.tokens, reply.finish_reason) == ([320], "stop")


def test_a_templates_end_that_no_vocabulary_knows_is_warned_about(tmp_path, console, caplog):
    """It may stand within turns, too, before a call."""
    target = folder(tmp_path / "target", llama(PADDED), with_template("<|message_sep|>"))
    assert foretoken.load(target, "none", runtime="transformers").ends.eos == {0}
    (record,) = [each for each in caplog.records if "ends turns" in each.message]
    assert record.levelname == "WARNING" and "(id 320)" in record.message
    shown = console("doctor", target, "--runtime", "transformers")
    assert shown.code == 0 and record.message in shown.out.replace("\n", " ")


def test_a_template_whose_end_is_an_end_is_silent(tmp_path, caplog):
    model = llama(PADDED)
    model.generation_config.eos_token_id = [0, 320]
    caplog.set_level("INFO", "foretoken")
    for end in ("<|im_end|>", "<|message_sep|>"):
        spec = foretoken.load(model, "none", tokenizer=with_template(end), runtime="transformers")
        assert spec.ends.eos == {0, 320}
    assert not [each for each in caplog.records if "ends turns" in each.message]


# How a model's own generation config would sample


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


# Kinds of models


def test_bert_is_refused(tmp_path):
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=64, intermediate_size=32, **shape)
    path = folder(tmp_path / "bert", transformers.BertForMaskedLM(config))
    refused(ForetokenError, "bert|Bert", path)
    refused(RefusedError, "bert", transformers.BertForMaskedLM(config))


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


def test_a_model_that_is_no_language_model_is_refused(tmp_path):
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    path = folder(tmp_path / "vit", transformers.ViTModel(config))
    refused(RefusedError, "is a vit model, neither causal nor encoder-decoder", path)


# What cannot be read


def test_unknown_models(tmp_path, pair):
    refused(InputError, "there is no folder 'no-such/model', and HF_HUB_OFFLINE", "no-such/model")
    refused(InputError, "is no folder", tmp_path / "missing")
    refused(InputError, "'no such thing!' is no folder", "no such thing!")
    refused(InputError, "'' is no folder", "")
    refused(InputError, "there is no folder .no-such.", pair[0], "no-such")
    refused(InputError, "is an empty folder", tmp_path)


@pytest.mark.parametrize(
    "text", ['{"eos_token_id": 5,}', "{bad", "[]", '{"eos_token_id": "x"}', "\xff"]
)
def test_a_broken_generation_config_is_not_passed_over(tmp_path, text):
    path = folder(tmp_path / "model", llama(64))
    (path / "generation_config.json").write_text(text, encoding="latin-1")
    refused(InputError, "generation_config.json cannot be read|eos_token_id='x'", path)


@pytest.mark.parametrize("text", ["{", "[]", '"text"', "{}", '{"model_type": "nothing"}'])
def test_a_broken_config(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    refused(ForetokenError, str(tmp_path), tmp_path)


def test_missing_and_broken_weights(tmp_path, pair):
    path = folder(tmp_path / "model", llama(64))
    (weights,) = path.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    refused(InputError, "cannot be loaded", path)
    weights.unlink()
    refused(InputError, "holds no weights", path)
    llama(64).model.save_pretrained(path)  # all but the output layer
    message = refused(InputError, "holds no weights for lm_head.weight", path)
    assert "give a complete LlamaForCausalLM" in message


def test_a_broken_tokenizer(tmp_path):
    path = folder(tmp_path / "model", llama(64))
    (path / "tokenizer.json").write_text("{")
    refused(InputError, "the tokenizer in .* cannot be read", path)


def test_remote_code_is_not_run(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}'
    )
    (tmp_path / "mine.py").write_text("raise SystemExit('ran')")
    refused(InputError, "cannot be read as a model", tmp_path)


def test_a_config_that_no_model_follows_from(tmp_path):
    path = folder(tmp_path / "model", llama(64))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"hidden_act": "nosuch"}))
    refused(InputError, "cannot be built from its config: .*nosuch", path)


def test_weights_of_another_size_are_told_by_name(tmp_path):
    path = folder(tmp_path / "model", llama(64))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    message = refused(InputError, "holds model.layers.0.mlp.down_proj.weight as", path)
    assert "(32, 48), its config says (32, 40)" in message


def test_a_tokenizer_that_needs_no_vocabulary_file(tmp_path):
    path = folder(tmp_path / "model", t5(384), transformers.ByT5Tokenizer())
    (completion,) = foretoken.load(path, "none").generate("It was", max_new_tokens=4)
    assert isinstance(completion.text, str)


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "GPT2Tokenizer", "PreTrainedTokenizerFast"])
def test_a_tokenizer_config_without_its_files_is_no_tokenizer(tmp_path, kind):
    path = folder(tmp_path / "model", llama(64))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    refused(InputError, "the tokenizer in .* cannot be read: ", path)
    assert foretoken.load(path, tokenizer=byte_level())


@pytest.mark.parametrize(
    ("args", "options", "says"),
    [
        ([5], {}, "target is 5; give a folder, a hub id or a model"),
        ([torch.nn.Linear(2, 2)], {}, "target is Linear"),
        (["a" * 5000], {}, "is no folder; give a model's folder"),
        (["a\0b"], {}, "is no folder; give a model's folder"),
        ([llama(64), "a" * 5000], {}, "is no folder; give a model's folder"),
        ([llama(64), foretoken.Drafter], {}, "draft is <class .*Drafter'>; give a folder"),
        ([llama(64), LookupDrafter], {}, "draft is <class .*LookupDrafter'>; give a folder"),
        ([llama(64)], {"tokenizer": 5}, "tokenizer is 5; give a folder, a hub id or a tokenizer"),
        ([llama(64)], {"tokenizer": "a" * 5000}, "the tokenizer in a+ cannot be read"),
        ([llama(64)], {"device": None}, "device is None; give 'cpu'"),
        ([llama(64)], {"device": "meta"}, "device 'meta' holds no numbers; give 'cpu'"),
        ([llama(64)], {"dtype": torch.float32}, "dtype is torch.float32; give one of"),
    ],
)
def test_values_of_another_kind(args, options, says):
    refused(InputError, says, *args, **options)


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


# The generation config


def test_what_changes_the_distribution_and_is_not_followed_is_refused_by_name():
    """Which entries those are: tests/unit/test_generation_config.py."""
    target = llama(64)
    target.generation_config.num_beams = 4
    message = refused(RefusedError, "sets num_beams=", target)
    assert "generation_config='ignore'" in message
    assert foretoken.load(target, generation_config="ignore").generate([1], max_new_tokens=2)


def test_its_temperature_is_not_read():
    target = llama(64)
    target.generation_config.update(do_sample=True, temperature=3.0, top_k=2, top_p=0.1)
    assert foretoken.load(target).generate([1, 2], max_new_tokens=4)


def test_generation_config_is_a_word(pair):
    refused(
        InputError,
        "generation_config is 'skip'",
        pair[0],
        generation_config="skip",
    )


# What is not built, and what does not fit


def test_a_precision_that_a_model_cannot_run_in(tmp_path):
    """The self-check runs a copy in float32, which says nothing of float64."""
    says = "MixtralForCausalLM does not run in float64 on cpu: .*; give dtype='float32'"
    model = build("Mixtral")
    model.save_pretrained(tmp_path)
    refused(RefusedError, says, tmp_path, "none", dtype="float64")
    refused(RefusedError, says, tmp_path, tmp_path, runtime="transformers", draft_dtype="float64")
    refused(RefusedError, says, model.double(), "none")
    assert foretoken.load(model.float(), "none").generate([5, 6], max_new_tokens=2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "half"}, "dtype is 'half'; give one of float32"),
        ({"device": "quantum"}, "device 'quantum' cannot be used"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used"),
    ],
)
def test_bad_values(options, says):
    refused(InputError, says, "no-such/model", **options)


def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_read(monkeypatch, tmp_path):
    shape = {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, num_hidden_layers=32, **shape
    )
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()  # no weights at all
    monkeypatch.setattr(memory, "free_bytes", lambda device: 20 * 10**9)
    message = refused(RefusedError, "needs 35.3 GB", tmp_path)
    assert "32.1 GB of weights" in message and "20.0 GB are free on cpu" in message
    message = refused(InputError, "cannot be loaded", tmp_path, dtype="bfloat16")  # 16 GB would


def test_the_missing_default_pair_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(named, "files", lambda package: tmp_path)
    refused(InputError, "a model that ships is missing at .*target")


def test_bars_of_transformers_are_hidden_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """And shown again as they were, whatever comes of the load."""
    seen = list[bool]()
    bars = transformers.utils.logging
    monkeypatch.setattr(loading, "_loaded", lambda *_: seen.append(bars.is_progress_bar_enabled()))
    before = bars.is_progress_bar_enabled()
    try:
        for shown in (True, False):
            (bars.enable_progress_bar if shown else bars.disable_progress_bar)()
            loading.load("novels")
            assert bars.is_progress_bar_enabled() == shown
    finally:
        (bars.enable_progress_bar if before else bars.disable_progress_bar)()
    assert seen == [False, False]
