"""The self-check catches what it is for, and remembers what passed."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    PreTrainedModel,
)

from foretoken.errors import RefusedError
from foretoken.loading.facts import ModelFacts, Placement
from foretoken.loading.runtimes.place import place
from foretoken.loading.sources import find_source
from foretoken.models.base import Model
from foretoken.models.stock import attention, check_results, positions, selfcheck, small_copy
from foretoken.models.stock.cache import CrossCache, RaggedCache, RaggedLayer
from foretoken.models.stock.check_results import compute_structure_key, run_self_check
from foretoken.models.stock.model import CausalModel
from foretoken.models.stock.selfcheck import build_torch_model, check
from tiny_families import build


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def keeps_stale_lengths(self, lengths):
    self.cache.lengths = [max(n, old - 1) for n, old in zip(lengths, self.cache.lengths)]  # noqa: B905


def forgets_to_permute(self, rows):
    self.lengths, self.slots = [self.lengths[b] for b in rows], list(range(len(rows)))


def stays_empty(self, place, row):
    pass


def grows_empty(self, like, rows, capacity, used):
    self.arrays = tuple(x.new_zeros(rows, x.shape[1], capacity, x.shape[3]) for x in like)
    self.is_initialized = True


def no_window(self, query_length, layer_idx):
    raise NotImplementedError("no mask sizes")


PLANTED = {
    "a rollback that keeps stale lengths": (
        "Llama", CausalModel, "set_lengths", keeps_stale_lengths,
    ),
    "masks of the longest row": (
        "Llama", RaggedCache, "get_query_offset", lambda self, layer_idx=0: self.max_context,
    ),
    "rows that change places by length only": ("Llama", RaggedCache, "select", forgets_to_permute),
    "content lost in growth": ("Llama", RaggedLayer, "resize", grows_empty),
    "rows that join without content": ("Llama", RaggedLayer, "put", stays_empty),
    "an attention that fails": ("Llama", RaggedCache, "get_mask_sizes", no_window),
    "shared keys in the wrong order": (
        "Llama", attention, "stacked_attention",
        lambda cache, q, k, v, mask, scale: torch.nn.functional.scaled_dot_product_attention(
            q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), mask, scale=scale
        ).transpose(1, 2),
    ),
    "a relative bias of the longest row": (
        "T5", attention, "shift_bias", lambda cache, bias: bias,
    ),
    "positions of the longest row": (
        "BART", positions.RowPositionEmbedding, "forward",
        lambda self, *args, **kwargs: self.table(*args, **kwargs),
    ),
    "sources without a mask": ("Marian", CrossCache, "make_source_mask", lambda self: None),
    "additive masks that hide nothing": (
        "Gemma 2", attention, "to_additive_mask", lambda mask, bias: bias.expand(mask.shape),
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, place, name, planted = PLANTED[bug]
    model = build(family)
    assert check(model).delta < selfcheck.LOGIT_TOLERANCE
    monkeypatch.setattr(place, name, planted)
    with pytest.raises(RefusedError, match=model.config.model_type):
        check(model)


def small_of(model: PreTrainedModel) -> PreTrainedModel:
    return small_copy.make_small_copy(type(model), model.config)


def test_a_lost_window_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the window the small copy's rows would see past it: they are longer than it."""
    config = build("Mistral").config
    config.sliding_window, config.max_position_embeddings = 4096, 8192
    model = type(build("Mistral"))(config)
    small = small_of(model)
    assert small.config.sliding_window == small_copy.COPY_WINDOW
    assert check(model).delta < selfcheck.LOGIT_TOLERANCE
    plain = attention.ragged_mask

    def causal_only(*args, **kwargs):
        kwargs["mask_function"] = lambda b, h, q, kv: (kv <= q).expand(b.shape[0], -1, -1, -1)
        return plain(*args, **kwargs)

    monkeypatch.setitem(
        attention.AttentionMaskInterface._global_mapping, "ragged_sdpa", causal_only
    )
    with pytest.raises(RefusedError, match="mistral"):
        check(model)


def test_passed_is_remembered(folder: Path) -> None:
    model = build("Llama")
    first, second = run_self_check(model), run_self_check(model)
    assert not first.from_cache and second.from_cache and second.delta == first.delta
    assert run_self_check(model).from_cache  # from the file
    (folder / "foretoken" / "selfcheck.json").write_text("{broken")
    assert not run_self_check(model).from_cache


@pytest.mark.parametrize(
    "failure", [MemoryError(), torch.OutOfMemoryError("no room"), OSError("disk"), KeyError("x")]
)
def test_a_passing_failure_is_no_refusal_for_ever(
    failure: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(model: PreTrainedModel) -> Model:
        raise failure

    model, form = build("Llama"), selfcheck.CheckedBackend("a ragged cache", failing)
    with pytest.raises(RefusedError, match="does not run over a ragged cache"):
        run_self_check(model, form)
    assert not (folder / "foretoken" / "selfcheck.json").exists()
    with monkeypatch.context() as patch, pytest.raises(RefusedError, match="no small copy can be"):
        patch.setattr(small_copy, "_require_small", lambda kind, config: failing(model))
        selfcheck.check(build("Llama").bfloat16())  # in float32 it would be checked itself
    assert not run_self_check(model).from_cache


def test_a_known_refusal_and_a_measured_deviation_are_remembered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(model: PreTrainedModel) -> Model:
        raise RefusedError("it has softcap")

    def deviating(model: PreTrainedModel) -> Model:
        return build_torch_model(type(model)(model.config))

    model, refusing_form = build("Llama"), selfcheck.CheckedBackend("a form", refusing)
    wrong = selfcheck.CheckedBackend("another", deviating)
    for form, says in ((refusing_form, "it has softcap"), (wrong, "is not exact over another")):
        with pytest.raises(RefusedError, match=says):
            run_self_check(model, form)
    monkeypatch.setattr(check_results, "check", lambda model, form: 1 / 0)
    for form, says in ((refusing_form, "it has softcap"), (wrong, "is not exact over another")):
        with pytest.raises(RefusedError, match=says):  # from the file
            run_self_check(model, form)


def module(path: Path, body: str) -> ModuleType:
    """A file of the user's with a class that is named like one of transformers'."""
    path.write_text(
        "import transformers\n\n"
        "class LlamaForCausalLM(transformers.LlamaForCausalLM):\n"
        "    def forward(self, input_ids=None, position_ids=None, **more):\n"
        f"        {body}\n"
        "        return super().forward(input_ids=input_ids, position_ids=position_ids, **more)\n"
    )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    imported = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = imported
    spec.loader.exec_module(imported)
    return imported


BREAKS = "position_ids = None if position_ids is None else position_ids * 0"


def test_a_class_of_the_same_name_is_checked_itself(tmp_path: Path) -> None:
    """Also after an edit of its file."""
    stock = build("Llama")
    run_self_check(stock)
    with pytest.raises(RefusedError, match="is not exact"):
        run_self_check(module(tmp_path / "mine_a.py", BREAKS).LlamaForCausalLM(stock.config))
    good = module(tmp_path / "mine_b.py", "pass").LlamaForCausalLM(stock.config)
    assert not run_self_check(good).from_cache and run_self_check(good).from_cache
    with pytest.raises(RefusedError, match="is not exact"):
        run_self_check(module(tmp_path / "mine_b.py", BREAKS).LlamaForCausalLM(stock.config))


def test_what_a_class_is_made_of_is_looked_at_too(tmp_path: Path, monkeypatch) -> None:
    """A layer, or a function, in a file beside the model's own."""
    monkeypatch.syspath_prepend(tmp_path)
    good, bad = "return x", "return x * (1 + x.shape[1])"
    (tmp_path / "mine_helper.py").write_text(f"def turned(x):\n    {bad}\n")
    (tmp_path / "mine_layers.py").write_text(
        "import mine_helper\nfrom torch import nn\n\n"
        "class Words(nn.Embedding):\n"
        "    def forward(self, ids):\n        return mine_helper.turned(super().forward(ids))\n"
    )
    (tmp_path / "mine_model.py").write_text(
        "import transformers\nfrom mine_layers import Words\n\n"
        "class Mine(transformers.LlamaForCausalLM):\n"
        "    def __init__(self, config):\n        super().__init__(config)\n"
        "        self.model.embed_tokens = Words(config.vocab_size, config.hidden_size)\n"
    )
    mine = importlib.import_module("mine_model")
    model = mine.Mine(build("Llama").config)
    with pytest.raises(RefusedError, match="is not exact"):
        run_self_check(model)
    (tmp_path / "mine_helper.py").write_text(f"def turned(x):\n    {good}\n")
    sys.modules["mine_helper"].turned = lambda x: x
    assert not run_self_check(model).from_cache and run_self_check(model).from_cache
    (tmp_path / "mine_helper.py").write_text(f"def turned(x):\n    {bad}\n")
    sys.modules["mine_helper"].turned = lambda x: x * (1 + x.shape[1])
    with pytest.raises(RefusedError, match="is not exact"):
        run_self_check(model)


def test_a_class_whose_source_cannot_be_read_is_checked_every_time(tmp_path: Path) -> None:
    stock = build("Llama")
    run_self_check(stock)
    gone = module(tmp_path / "mine_c.py", "pass").LlamaForCausalLM(stock.config)
    (tmp_path / "mine_c.py").unlink()
    assert compute_structure_key(gone) is None
    assert not any(run_self_check(gone).from_cache for _ in range(2))


def test_a_folder_that_cannot_be_made_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not run_self_check(build("Llama")).from_cache


def test_structure_is_what_matters() -> None:
    plain = build("Llama")
    config = build("Llama").config
    config.hidden_size, config.num_hidden_layers, config.vocab_size = 64, 5, 100
    wider = type(plain)(config)
    assert compute_structure_key(wider) == compute_structure_key(plain)
    assert (
        len({compute_structure_key(build(name)) for name in ("Llama", "Mistral", "Qwen2", "T5")})
        == 4
    )
    assert compute_structure_key(build("T5")) != compute_structure_key(build("T5 v1.1"))


def test_a_large_model_is_checked_small() -> None:
    large = {"d_model": 1024, "decoder_layers": 12, "encoder_layers": 12, "vocab_size": 50000}
    with torch.device("meta"):
        model = BartForConditionalGeneration(BartConfig(**large))
    small = small_of(model)
    assert sum(weight.numel() for weight in small.parameters()) < 200_000
    assert len(small.get_decoder().layers) == len(small.get_encoder().layers) == 2


SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("DeepseekV3ForCausalLM", transformers.DeepseekV3Config()),
        ("Gemma4ForCausalLM", transformers.Gemma4TextConfig()),
        ("Gemma3nForCausalLM", transformers.Gemma3nTextConfig()),
        ("Mistral4ForCausalLM", transformers.Mistral4Config()),
        (
            "Qwen2VLForConditionalGeneration",
            transformers.Qwen2VLConfig(text_config={"rope_parameters": SECTIONS}),
        ),
    ],
)
def test_heads_with_parts_of_their_own_are_narrowed(name: str, config: Any) -> None:
    """Latent attention, widths that differ by layer, layers that read others' keys, positions of
    several axes."""
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    small = small_of(model)
    text = small.config.get_text_config(decoder=True)
    assert text.hidden_size <= 512 and text.num_hidden_layers <= 8
    assert check(model).delta < selfcheck.LOGIT_TOLERANCE


def test_a_copy_that_is_not_small_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a large model would take all memory, and the process with it."""
    monkeypatch.setattr(small_copy, "MAX_COPY_PARAMETERS", 1000)
    built: list[int] = []
    monkeypatch.setattr(small_copy, "randomize_weights", built.append)
    with torch.device("meta"):
        empty = build("Llama")
    for model in (empty, build("Llama").bfloat16()):
        with pytest.raises(RefusedError, match="no small copy can be built, its code raised Memo"):
            check(model)
    assert not built


def test_without_a_copy_the_model_is_checked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_copy, "MAX_COPY_PARAMETERS", 1000)
    model = build("Llama").train()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert check(model).on_full_model and model.training
    assert all(torch.equal(before[name], own) for name, own in model.state_dict().items())
    family, place, name, planted = next(iter(PLANTED.values()))
    small_copy.randomize_weights(sick := build(family))
    monkeypatch.setattr(place, name, planted)
    with pytest.raises(RefusedError, match="is not exact"):
        check(sick)


def test_a_folder_whose_copy_cannot_be_built_is_loaded_and_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(small_copy, "MAX_COPY_PARAMETERS", 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build("Llama").save_pretrained(tmp_path / "m")
    model, placement = find_source(tmp_path / "m", None, False), Placement(runtime="transformers")
    placed = place(ModelFacts(model), placement)
    assert "checked on the model: no small copy of it" in placed.reason
    again = place(ModelFacts(find_source(tmp_path / "m", None, False)), placement)
    assert "checked on" not in again.reason  # it is remembered


def test_an_error_of_the_family_s_own_code_is_logged_and_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failing(model: PreTrainedModel) -> Model:
        raise AttributeError("'Config' object has no attribute 'num_layers'")

    caplog.set_level("DEBUG", logger="foretoken")
    with pytest.raises(RefusedError) as refusal:
        check(build("Llama"), selfcheck.CheckedBackend("a form", failing, remedy="do without it"))
    says = "llama (LlamaForCausalLM) does not run over a form: its code raised AttributeError"
    assert str(refusal.value) == f"{says}; do without it"
    assert isinstance(refusal.value.__cause__, AttributeError)
    assert "no attribute 'num_layers'" in caplog.text


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "BART"])
def test_a_short_context_is_no_obstacle(name: str) -> None:
    config = build(name).config
    config.max_position_embeddings = 16
    assert check(type(build(name))(config)).delta < selfcheck.LOGIT_TOLERANCE


def test_every_kind_of_layer_is_kept() -> None:
    config = build("Gemma 3").config
    config.layer_types = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"]
    config.num_hidden_layers = 7
    small = small_copy.shrink_config(config, small_copy.COPY_HEAD_DIM)
    assert set(small.layer_types) == {"sliding_attention", "full_attention"}
    assert small.num_hidden_layers == len(small.layer_types) == 3


def test_the_callers_randomness_is_left_alone() -> None:
    model = build("T5")
    before = torch.get_rng_state(), random.getstate()
    check(model)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_the_small_copy_is_far_from_flat() -> None:
    for name in ("Llama", "GPT-2", "T5", "Gemma 2"):
        small = small_of(build(name))
        rows = selfcheck.CheckedSequences(small, random.Random(0))
        rows.start([5])
        rows.score(3)
        assert rows.spread > 0.3
