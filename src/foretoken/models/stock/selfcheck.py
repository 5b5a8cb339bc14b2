"""The self-check: a test that a family is exact over our cache, made before the model is used.

A small random copy of the model (same class and structure, few layers, windows of 8 tokens) goes
through ragged blocks, rollbacks, joins and leaves, and every logit is compared with a full forward
of the stock model on that row alone. The outcome is remembered per structure and versions. It does
not know the real weights: it tests the family's code, not the model.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import inspect
import json
import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.generation.utils import GenerationMixin

from foretoken.errors import RefusedError, kind_of
from foretoken.media.inputs import ENCODED, Media
from foretoken.models.base import Model, ReadsMedia, Switches
from foretoken.models.rows import staying
from foretoken.models.stock import cache, media
from foretoken.models.stock.attention import twin
from foretoken.models.stock.media import (
    NO_TOKEN,
    encoder_input,
    made_up,
    random_states,
    writer,
)
from foretoken.models.stock.model import CausalModel, Seq2SeqModel
from foretoken.models.stock.sizes import LIMITS, context_limit, reads_ids, switch_of
from foretoken.storage.cache import remember, remembered, versions

# Raised where the check, or a runtime that it checks, computes something else: it then runs again
CHECK_FORMAT = 15
TOLERANCE = 1e-4  # of the spread of the logits, in float32
VOCABULARY = 64
WINDOW = 8
HEAD, HEADS = 16, 2  # width of a head, and how many keys and values have at most
OWN = -1  # a head as wide as it is
STATES = 128  # hidden size of a model without attention
# Names of lengths: windows, chunks, floors of a scale that grows with the position, room in experts
THRESHOLD = re.compile(r"(window|chunk)(_size|_len)?$|floor|^local_attention$|^expert_capacity$")
SWITCH = "original_max_position_embeddings"  # where the factors of rotary positions change
CONTEXT = 128  # positions that the check needs
# Names of a state space layer's heads, their width, the factor of the hidden size, groups, state
STATE_SPACES = (
    ("mamba_n_heads", "mamba_d_head", "mamba_expand", "mamba_n_groups", "mamba_d_state"),
    ("mamba_num_heads", "mamba_head_dim", "expand", "n_groups", "ssm_state_size"),
    ("n_mamba_heads", "mamba_headdim", "mamba_expand", "mamba_ngroups", "mamba_d_state"),
    ("num_heads", "head_dim", "expand", "n_groups", "state_size"),
)
# Names of linear attention's heads and their widths, and of experts, by what the copy has at most
FEWER: dict[int, tuple[str, ...]] = {
    HEADS: ("linear_num_heads", "linear_num_key_heads"),
    2 * HEADS: ("linear_num_value_heads",),
    HEAD: ("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"),
    16: ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
}
LARGEST = 1_000_000_000  # parameters of a small copy
FILE = "selfcheck.json"
OURS = {"foretoken", "torch", "transformers"}  # also where they are installed from a checkout
INSTALLED = {"site-packages", "dist-packages"}
# What a check does not depend on: weights are plain when they are here
UNSEEN = ("_name_or_path", "architectures", "dtype", "transformers_version", "quantization_config")
FOUND: dict[str, float | str] = {}  # by structure, in this process: deviation or objection


class Whole(Protocol):
    """Logits `[need, V]` of the last tokens of a text `[1, n]` that is read by itself, by the stock
    model; `source` `[1, m]` is for the encoder."""

    def __call__(
        self, model: PreTrainedModel, text: Tensor, source: Tensor | None, need: int
    ) -> Tensor: ...


def forward(model: PreTrainedModel, text: Tensor, source: Tensor | None, need: int) -> Tensor:
    """A `Whole`: one forward of the stock model."""
    ids: Any = {"input_ids": text}
    if source is not None:
        ids = {**encoder_input(model, source), "decoder_input_ids": text}
    return model(**ids, use_cache=False, return_dict=True).logits[0, -need:]


@dataclass(frozen=True, slots=True)
class Form:
    """A way to run a model, and its name in an error."""

    name: str
    run: Callable[[PreTrainedModel], Model]
    switches: bool = False  # it also runs texts that a model reads in another way
    instead: str = ""  # what to do where a family fails in it; "": another form is tried
    admit: Callable[[PreTrainedModel], None] = cache.admit  # raises RefusedError
    whole: Whole = forward  # what its logits are compared with
    costs: str = ""  # what it costs beside the others


def on_torch(model: PreTrainedModel) -> Model:
    encodes = writer(model).config.is_encoder_decoder
    return (Seq2SeqModel if encodes else CausalModel)(model)


ON_TORCH = Form(
    "a ragged cache",
    on_torch,
    switches=True,
    instead=cache.INSTEAD,
    admit=partial(cache.admit, states=True),
)


class Unfinished(RefusedError):
    """A check that broke off, by an error in the family's code or for lack of memory. It is not
    remembered: the next one may end otherwise."""


class UnbuiltError(Unfinished):
    """No small copy can be built, and there are no weights to check instead."""


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of a self-check that passed."""

    name: str  # class
    delta: float  # largest |delta logit| over the spread of the logits
    seconds: float
    remembered: bool  # from an earlier run
    itself: bool = False  # made on the model, as no small copy can be built


def self_check(model: PreTrainedModel, form: Form = ON_TORCH) -> Check:
    """Refuse a model whose family is not exact over our cache; once per structure and versions.

    `model` may be on the meta device. Raises RefusedError naming the family and what failed.
    """
    form.admit(model)
    start, key = time.perf_counter(), structure(model, form)
    if key is None:
        return check(model, form)
    if key not in FOUND:
        FOUND.update(remembered(FILE))
    verification = FOUND.get(key)
    if isinstance(verification, str):
        raise RefusedError(verification)
    if isinstance(verification, float):
        return Check(type(model).__name__, verification, time.perf_counter() - start, True)
    try:
        passed = check(model, form)
        FOUND[key] = passed.delta
    except Unfinished:
        raise
    except RefusedError as error:
        FOUND[key] = str(error)
        raise
    finally:
        if key in FOUND:
            remember(FILE, key, FOUND[key])
    return passed


def check(model: PreTrainedModel, form: Form = ON_TORCH) -> Check:
    """The self-check itself, whatever is remembered. Where no small copy can be built, the model
    is checked itself, if it has its weights, in float32."""
    form.admit(model)
    start, name = time.perf_counter(), f"{model.config.model_type} ({type(model).__name__})"
    itself = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            small = small_copy(type(model), model.config, switch_for(model, form))
        except Exception as error:  # its config may be made in any way
            if model.device.type == "meta" or model.dtype != torch.float32:
                kind = kind_of(error)
                reason = f"cannot be checked: no small copy can be built, its code raised {kind}"
                raise UnbuiltError(_told(name, reason, form)) from error
            small, itself = twin(model), True
    try:
        runner = form.run(small)
        delta = max(deviation(small, runner, form.whole), media_deviation(small, runner))
        apart = contradiction(small, form.whole)
    except RefusedError:
        raise
    except Exception as error:  # an unknown forward raises anything
        reason = f"does not run over {form.name}: its code raised {kind_of(error)}"
        raise Unfinished(_told(name, reason, form)) from error
    if not delta < TOLERANCE:
        difference = f"logits differ by {delta:.1e} of their spread from a full forward"
        raise RefusedError(_told(name, f"is not exact over {form.name}: {difference}", form))
    if not apart < TOLERANCE:
        windowed = thresholds(model.config.get_text_config(decoder=True))
        where, remedy = "", cache.INSTEAD
        if windowed:
            where = "behind its window "
            remedy = "use a configuration whose window is the whole context"
        raise RefusedError(
            f"{name} contradicts itself: {where}transformers' generate differs from its own "
            f"forward of the whole text by {apart:.1e} of their spread, and no text is the right "
            f"one; {remedy}"
        )
    return Check(type(model).__name__, delta, time.perf_counter() - start, False, itself)


def _told(name: str, reason: str, form: Form) -> str:
    return f"{name} {reason}" + (f"; {form.instead}" if form.instead else "")


def deviation(model: PreTrainedModel, runner: Model | None = None, whole: Whole = forward) -> float:
    """Largest |delta logit| over the spread of the logits, of ragged batches against the stock
    model on each row alone, read whole.

    `runner` runs the batches; None: on torch. Rows join, grow by ragged blocks, go back, change
    places and leave, past windows of `WINDOW` tokens and the cache's first capacity.
    """
    rows = CheckedRows(model.eval(), random.Random(0), runner, whole)
    rows.start([cache.BUCKET - 4, 3, 11])
    for width in (1, 5, 0, 12):
        rows.score(width)
    rows.start([0, 6])
    for width in (4, 9):
        rows.score(width)
    rows.leave([1])
    rows.score(5)
    rows.permute([2, 0, 0, 3])
    for width in (3, 1, 1):
        rows.score(width)
    rows.leave([0, 1, 2, 3])
    rows.start([3])  # alone: nothing is padded, and an encoder has no mask
    rows.score(2)
    return rows.worst / rows.spread


def media_deviation(model: PreTrainedModel, runner: Model) -> float:
    """The same against the stock model's `generate`, of inputs of an encoder that can be made up;
    those of other families are tried when the first come."""
    if not isinstance(runner, ReadsMedia) or not (inputs := made_up(model)):
        return 0.0
    runner.permute([])  # no rows are left
    return media.deviation(model, runner, Media([], inputs))


def contradiction(model: PreTrainedModel, whole: Whole = forward) -> float:
    """Largest |delta logit| over their spread between `generate`, which caches, and the text that
    it makes read whole, past windows of `WINDOW` tokens and across the length at which the model
    reads a text in another way."""
    if model.config.is_encoder_decoder:  # such a text begins with one token
        return _contradiction(model, 1, 3 * WINDOW, whole)
    switch = switch_of(model)
    starts = [3 * WINDOW] if switch is None else [3 * WINDOW, switch - 1]
    return max(_contradiction(model, start, 4, whole) for start in starts)


@torch.inference_mode()
def _contradiction(model: PreTrainedModel, start: int, new: int, whole: Whole) -> float:
    """The same of `new` tokens of a text that begins with `start`."""
    dice = random.Random(1)
    ids = [[dice.randrange(2, VOCABULARY) for _ in range(start)]]
    text, source = torch.tensor(ids, device=model.device), None
    if model.config.is_encoder_decoder:
        source = torch.arange(2, 4 + 2 * WINDOW, device=model.device)[None]
    made = generated(model, text, source, new)
    worst, spread = 0.0, 1e-9
    for i, cached in enumerate(made.logits):  # each by the text up to it: factors follow its length
        full = whole(model, made.sequences[:, : start + i], source, 1)[0]
        worst = max(worst, float((cached[0] - full).abs().max().nan_to_num(float("inf"))))
        spread = max(spread, float(full.max() - full.min()))
    return worst / spread


@torch.inference_mode()
def generated(model: PreTrainedModel, text: Tensor, source: Tensor | None, new: int) -> Any:
    """Return what transformers' `generate` makes of a text `[1, n]` by `new` tokens: `sequences`,
    and the `logits` before each."""
    given: Any = {"input_ids": text}
    if source is not None:
        given = {**encoder_input(model, source), "decoder_input_ids": text}
    settings = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0, num_beams=1)
    settings.eos_token_id = NO_TOKEN
    settings.output_logits = settings.return_dict_in_generate = True
    settings.decoder_start_token_id = int(text[0, 0])
    network: Any = model
    # a family's own may ask for sounds, which the check has none of
    kind: Any = GenerationMixin if ENCODED in given else type(network)
    return kind.generate(network, **given, generation_config=settings)


class CheckedRows:
    """Random operations on a model's rows; its logits are compared with the stock model's."""

    def __init__(
        self,
        model: PreTrainedModel,
        dice: random.Random,
        runner: Model | None = None,
        whole: Whole = forward,
    ) -> None:
        self.model, self.dice, self.whole = model, dice, whole
        self.runner = runner or on_torch(model)
        self.ids = min(self.runner.vocab_size, VOCABULARY)
        self.source_length = 10 if made_up(model) else 0  # states, always as many; 0: any number
        self.texts: list[list[int]] = []
        self.sources: list[list[int]] = []
        self.worst, self.spread = 0.0, 1e-9

    def draw(self, n: int) -> list[int]:
        return [self.dice.randrange(2, self.ids) for _ in range(n)]

    def start(self, lengths: list[int]) -> None:
        texts = [self.draw(n) for n in lengths]
        sources = [self.draw(self.source_length or self.dice.randint(1, 10)) for _ in lengths]
        rows = zip(texts, sources, strict=True)
        for long, group in groupby(rows, lambda row: self.is_long(len(row[0]) + 1)):
            some = list(group)
            self.announce(long)
            self.runner.start([t for t, _ in some], self.heard([s for _, s in some]))
        self.texts, self.sources = self.texts + texts, self.sources + sources

    def heard(self, sources: list[list[int]]) -> list[list[int]] | None:
        """The sources for the runner, or their states, handed to it."""
        if not self.runner.encoder_decoder or reads_ids(self.model):
            return sources if self.runner.encoder_decoder else None
        tensors = [torch.tensor([s], device=self.model.device) for s in sources]
        states = [{ENCODED: random_states(self.model, x)} for x in tensors]
        reader: Any = self.runner
        reader.attached = [Media([], each) for each in states]
        return [[] for _ in sources]

    def score(self, width: int) -> None:
        """A block of up to `width` tokens per row, then a rollback of up to `width`."""
        blocks = [self.draw(self.dice.randint(width // 2, width)) for _ in self.texts]
        need = [self.dice.randint(min(1, len(b)), len(b)) for b in blocks]
        self.read_again(blocks)
        logits = self.runner.score(blocks, need)
        self.texts = [text + block for text, block in zip(self.texts, blocks, strict=True)]
        for b, n in enumerate(need):
            if n:
                self.compare(logits[b, :n], self.alone(b, n))
        back = [self.dice.randint(0, min(len(t), width)) for t in self.texts]
        self.texts = [t[: len(t) - n] for t, n in zip(self.texts, back, strict=True)]
        self.runner.set_lengths([len(text) for text in self.texts])

    def announce(self, long: bool) -> None:
        """Rows are about to join that are long, or are not."""
        if isinstance(self.runner, Switches):
            self.runner.beyond(long)

    def is_long(self, length: int) -> bool:
        return self.runner.context is not None and length > self.runner.context

    def read_again(self, blocks: list[list[int]]) -> None:
        """Rows that these blocks take to where a model reads a text in another way join again."""
        if not isinstance(self.runner, Switches) or self.runner.longest == self.runner.context:
            return
        ends = [len(text) + len(block) for text, block in zip(self.texts, blocks, strict=True)]
        rows = enumerate(zip(ends, self.runner.long, blocks, strict=True))
        again = [b for b, (end, long, block) in rows if block and self.is_long(end) != long]
        order = [*staying(len(self.texts), again), *again]
        self.runner.leave(again)
        for b in again:
            self.announce(self.is_long(ends[b]))
            self.runner.start([self.texts[b]])
        self.runner.permute([order.index(b) for b in range(len(order))])

    def compare(self, ours: Tensor, stock: Tensor) -> None:
        difference = (ours - stock).abs().max().nan_to_num(float("inf"))
        self.worst = max(self.worst, float(difference))
        self.spread = max(self.spread, float(stock.max() - stock.min()))

    @torch.inference_mode()
    def alone(self, b: int, n: int) -> Tensor:
        """Logits `[n, V]` of the last tokens of row b by the stock model."""
        text = torch.tensor([self.texts[b]], device=self.model.device)
        source = None
        if self.runner.encoder_decoder:
            source = torch.tensor([self.sources[b]], device=self.model.device)
        return self.whole(self.model, text, source, n)

    def permute(self, rows: list[int]) -> None:
        self.runner.permute(rows)
        self._become(rows)

    def leave(self, rows: list[int]) -> None:
        self.runner.leave(rows)
        self._become(staying(len(self.texts), rows))

    def _become(self, rows: list[int]) -> None:
        self.texts, self.sources = [self.texts[b] for b in rows], [self.sources[b] for b in rows]


def small_copy(
    kind: type[PreTrainedModel],
    config: PreTrainedConfig,
    switch: int = CONTEXT,
    *,
    reads_text: bool = True,
) -> PreTrainedModel:
    """A random model of that class and structure, in float32 on the CPU: as narrow as its code
    allows, at most the configuration as it is. Raises whatever its code raises. reads_text: it is
    tried on some."""
    problem: Exception | None = None
    for attempt in (
        lambda: shrunk(config, HEAD, switch),
        lambda: shrunk(config, HEAD, switch, ties=True),
        lambda: remade(shrunk(config, HEAD, switch, ties=True), config),
        lambda: remade(shrunk(config, HEAD, switch, ties=True, each=2), config),
        lambda: shrunk(config, OWN, switch),
        lambda: shrunk(config, None, switch),
        lambda: remade(shrunk(config, None, switch), config),
        lambda: copy.deepcopy(config),
    ):
        try:
            own = attempt()
            _require_small(kind, own)
            small: Any = kind(own).float().eval()
            stir(small)
            ids = torch.ones(1, 2, dtype=torch.long)
            if not reads_text:
                return small
            with torch.inference_mode():
                sources = {"decoder_input_ids": ids} | encoder_input(small, ids)
                writer(small)(**(sources if own.is_encoder_decoder else {"input_ids": ids}))
            return small
        except Exception as error:  # narrow widths may not fit each other
            problem = problem or error
    assert problem is not None
    raise problem


def _require_small(kind: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """MemoryError for a copy that is no small one: of a large model it would take all memory."""
    with torch.device("meta"):
        size = sum(weight.numel() for weight in kind(config).parameters())
    if size > LARGEST:
        raise MemoryError(f"the copy has {size} parameters")


def switch_for(model: PreTrainedModel, form: Form) -> int:
    """From which length on a small copy reads texts with the other rotary factors: within the check
    where this form can, else beyond it."""
    return 2 * WINDOW if form.switches and switch_of(model) is not None else CONTEXT


def shrunk(
    config: PreTrainedConfig,
    head: int | None,
    switch: int = CONTEXT,
    *,
    ties: bool = False,
    each: int = 1,
) -> PreTrainedConfig:
    """The configuration of the small copy.

    Args:
        config: The model's.
        head: The width of a head, OWN for the one it has; None: all widths stay.
        switch: From which length on texts are read with the other rotary factors.
        ties: Sizes that equal the hidden size, or a head's, stay equal.
        each: Layers of each kind; there are two at least.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = None
    for part in parts(config):
        shrink(part, head, switch, ties, each)
    return config


def parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """The configuration and those in it."""
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            yield from parts(part)


def remade(config: PreTrainedConfig, before: PreTrainedConfig) -> PreTrainedConfig:
    """The same settings given to the configuration's class, which derives others from them: those
    that it need not be given, and that are as in `before`."""
    settings = {
        each.name: getattr(config, each.name)
        for each in dataclasses.fields(config)
        if each.name in vars(config) and not _derived(each, config, before)
    }
    for name in config.sub_configs:
        if isinstance(settings.get(name), PreTrainedConfig):
            settings[name] = remade(settings[name], getattr(before, name))
    return type(config)(**settings)


def _derived(
    field: dataclasses.Field[Any], config: PreTrainedConfig, before: PreTrainedConfig
) -> bool:
    value = getattr(config, field.name)
    return field.default is None and type(value) is int and value == value_of(before, field.name)


def value_of(part: PreTrainedConfig, name: str) -> Any:
    """A setting; None where it is missing or where each layer has its own."""
    try:
        return getattr(part, name, None)
    except Exception:  # transformers' own kinds
        return None


def shrink(part: PreTrainedConfig, head: int | None, switch: int, ties: bool, each: int) -> None:
    settings: dict[str, Any] = {"vocab_size": VOCABULARY, "decoder_vocab_size": VOCABULARY}
    settings["vocab_size_per_layer_input"] = VOCABULARY
    settings |= dict.fromkeys(thresholds(part), WINDOW)
    settings[SWITCH] = switch
    settings |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    settings |= {"decoder_start_token_id": 0, "forced_eos_token_id": 1}
    limit = max(CONTEXT, context_limit(part) or 0)
    settings |= dict.fromkeys(LIMITS, limit)
    if value_of(part, "num_hidden_layers") is not None:
        shorten(part, each)
    if head is not None and value_of(part, "num_attention_heads"):
        settings |= widths(part, head)
    elif head is not None and value_of(part, "hidden_size"):  # layers of states only
        settings |= {"hidden_size": STATES, "num_heads": HEADS} | _recurrent(part, STATES)
    if ties:
        settings |= tied(part, settings)
    layers_own = getattr(vars(part).get("_heterogeneity_spec"), "per_layer_attributes", ())
    for name, value in settings.items():
        before = value_of(part, name)
        if name in layers_own or before is None:
            continue
        with suppress(AttributeError, NotImplementedError):  # one that follows from others
            try:
                setattr(part, name, value)
            except StrictDataclassFieldValidationError:  # there are several
                setattr(part, name, [value] * len(before))
    ropes: dict[str, Any] = getattr(part, "rope_parameters", None) or {}
    for rope in (ropes, *(value for value in ropes.values() if isinstance(value, dict))):
        shrink_rope(rope, head == HEAD, switch)


def thresholds(part: PreTrainedConfig) -> list[str]:
    """The settings that say from which length of a text, or at which distance, a model behaves
    otherwise, where its texts get there: then the check is to get there too."""
    limit = getattr(part, "max_position_embeddings", None) or math.inf
    numbers = {k: v for k, v in vars(part).items() if isinstance(v, int) and WINDOW < v < limit}
    return [name for name in numbers if THRESHOLD.search(name)]


def shrink_rope(rope: dict[str, Any], narrow: bool, switch: int) -> None:
    """The same for rotary positions, whose factors are one for each pair of a head's values."""
    if rope.get(SWITCH) is not None:
        kind = rope.get("rope_type")  # texts end at a dynamic one's, and the check's are longer
        rope[SWITCH] = {"longrope": switch, "dynamic": CONTEXT}.get(str(kind), 2 * WINDOW)
    pairs = int(HEAD * rope.get("partial_rotary_factor", 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        if narrow and isinstance(rope.get(name), list):
            factors = rope[name]
            rope[name] = [factors[i * len(factors) // pairs] for i in range(pairs)]


def shorten(part: PreTrainedConfig, each: int) -> None:
    """Keep so many layers of each kind, at least two; of those that read earlier layers' keys,
    too."""
    count = part.num_hidden_layers
    stack = value_of(part, "num_layers_per_stack")  # which runs several times
    if stack:
        part.num_hidden_layers, part.num_layers_per_stack = 2 * count // stack, 2
        return
    lists = {k: v for k, v in vars(part).items() if isinstance(v, list) and len(v) == count}
    readers = value_of(part, "num_kv_shared_layers") or 0
    kinds = [
        repr([i >= count - readers, *(values[i] for values in lists.values())])
        for i in range(count)
    ]
    picked = [i for i in range(count) if i < 2 or kinds[:i].count(kinds[i]) < each]
    if readers:
        part.num_kv_shared_layers = sum(i >= count - readers for i in picked)
    pattern = value_of(part, "block_types")  # which layers repeat, for as many as there are
    if isinstance(pattern, list) and 1 < len(pattern) < count:
        picked = [*range(len(pattern))]
    for name, values in lists.items():
        setattr(part, name, [values[i] for i in picked])
    sizes: dict[str, Any] = dict.fromkeys(
        ("encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers", "num_blocks"),
        len(picked),
    )
    # kinds by number: the second layer is of the rarer one
    sizes |= {f"{kind}_layer_period": 2 for kind in ("attn", "expert")}
    sizes |= {f"{kind}_layer_offset": 1 for kind in ("attn", "expert")}
    for name, value in ({"attn_layer_indices": [1]} | sizes).items():
        if getattr(part, name, None) is not None:
            setattr(part, name, value)
    with suppress(AttributeError, NotImplementedError):  # one that follows from the lists
        part.num_hidden_layers = len(picked)


def widths(part: PreTrainedConfig, head: int) -> dict[str, Any]:
    """Return settings of a few heads, as many queries per key as before but two at most."""
    heads = part.num_attention_heads
    key_heads = value_of(part, "num_key_value_heads") or heads
    few = min(key_heads, HEADS)
    queries = few * min(heads // key_heads, 2)
    if head == OWN:
        head = value_of(part, "head_dim") or part.hidden_size // heads
    settings: dict[str, Any] = dict.fromkeys(
        ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads"), queries
    )
    settings |= {"num_key_value_heads": few, "head_dim": head, "d_kv": head}
    settings |= dict.fromkeys(("hidden_size", "d_model", "word_embed_proj_dim"), head * queries)
    settings |= _fixed(part, queries) | _recurrent(part, head * queries)
    for most, names in FEWER.items():
        counts = {name: value_of(part, name) for name in names}
        settings |= {k: min(n, most) for k, n in counts.items() if type(n) is int}
    inner = ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff")
    return settings | dict.fromkeys((*inner, "n_inner", "moe_intermediate_size"), 32)


def _recurrent(part: PreTrainedConfig, width: int) -> dict[str, Any]:
    """Heads of state space layers, which divide a multiple of the hidden size among them."""
    for heads, size, expand, groups, state in STATE_SPACES:
        if value_of(part, heads) and value_of(part, size) and value_of(part, state):
            inner = width * (value_of(part, expand) or 1)
            few = {heads: HEADS, size: inner // HEADS, groups: 1, state: HEAD}
            return few | {"mamba_d_ssm": inner, "mamba_dt_rank": HEADS}
    return {}


def tied(part: PreTrainedConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings of the other sizes that equal the hidden size, or a head's."""
    sizes = {name: value_of(part, name) for name in ("hidden_size", "head_dim")}
    return {
        other: settings[name]
        for name, size in sizes.items()
        if name in settings
        for other, value in vars(part).items()
        if type(value) is int and value == size and value > VOCABULARY and other not in settings
    }


def _fixed(part: PreTrainedConfig, queries: int) -> dict[str, Any]:
    """Widths of heads with parts of their own: those that positions turn and those they do not
    (latent attention), or one for each axis (sections, whose heads stay as wide as they are)."""
    ropes: dict[str, Any] = value_of(part, "rope_parameters") or {}
    if value_of(part, "qk_rope_head_dim"):
        share = ropes.get("partial_rotary_factor") or 0.5  # of a head, that positions turn
        latent = {"qk_rope_head_dim": HEAD, "qk_nope_head_dim": round(HEAD / share) - HEAD}
        latent |= {"qk_head_dim": round(HEAD / share), "v_head_dim": 8}
        latent |= {"head_dim": round(HEAD / share)} if "partial_rotary_factor" in ropes else {}
        return latent | {"q_lora_rank": 16, "kv_lora_rank": 16}
    if not ropes.get("mrope_section"):
        return {}
    width = getattr(part, "head_dim", None) or part.hidden_size // part.num_attention_heads
    return {"head_dim": width, "hidden_size": width * queries}


def stir(model: PreTrainedModel) -> None:
    """Draw larger weights than the usual initial ones, whose logits are nearly flat."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5)


def structure(model: PreTrainedModel, form: Form = ON_TORCH) -> str | None:
    """A digest of what a check depends on: class, small configuration, versions, `CHECK_FORMAT` and
    the code of classes from no library; None where that code cannot be read, or the configuration
    not be made."""
    try:
        switch = switch_for(model, form)
        config = shrunk(model.config, HEAD, switch).to_dict()
    except Exception:  # the check itself will say so
        return None
    for name in UNSEEN:
        config.pop(name, None)
    try:
        code = strangers(model)
    except (OSError, TypeError, UnicodeDecodeError):
        return None
    name = [type(model).__module__, type(model).__qualname__, form.name]
    parts = json.dumps([CHECK_FORMAT, name, config, versions(), code], sort_keys=True, default=str)
    return hashlib.sha256(parts.encode()).hexdigest()


def strangers(model: PreTrainedModel) -> list[str]:
    """The sources of all parts of the model that come from no library, with what they import from
    outside the libraries' folders. Raises where a part has no source."""
    kinds = {base for part in model.modules() for base in type(part).__mro__}
    files = {inspect.getfile(kind) for kind in kinds if not _is_library(kind.__module__)}
    fresh = {kind.__module__ for kind in kinds if not _is_library(kind.__module__)}
    visited: set[str] = set()
    while fresh:
        name = fresh.pop()
        visited.add(name)
        module = sys.modules.get(name)
        files |= {own} if (own := getattr(module, "__file__", None)) else set()
        values = list(vars(module).values()) if module else []
        names = {
            getattr(v, "__name__" if inspect.ismodule(v) else "__module__", "") for v in values
        }
        fresh |= {
            part for part in names - visited if isinstance(part, str) and not _is_library(part)
        }
    return [Path(file).read_text() for file in sorted(files)]


def _is_library(name: str) -> bool:
    """Tell whether a module is installed, Python's own, this package's, or not loaded."""
    package = name.split(".")[0]
    if not name or package in OURS or package in sys.stdlib_module_names:
        return True
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file is None:
        return module is None
    return bool(INSTALLED & set(Path(file).parts))
