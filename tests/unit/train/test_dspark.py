"""What DSpark is taught is what its drafter draws from in use; blocks learn what lies ahead."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import foretoken
import tiny
from foretoken.drafters.dflash import BlockDrafter
from foretoken.models.hidden_states import FINAL_TAP
from foretoken.models.stock.attention import RaggedTwin
from foretoken.models.stock.dflash import BlocksDraft, StockBlockModel
from foretoken.models.stock.model import CausalModel
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import SequenceKey
from foretoken.train.corpus import Example, Examples
from foretoken.train.dspark import BlockStudent, DSparkLesson, find_rarest_token
from foretoken.train.hidden_state_dataset import SequenceHiddenStates
from foretoken.train.recipe import TrainingRecipe
from foretoken.train.student import choose_taps, teach
from students import ROOM, V, network

BLOCK = 5
PROMPTS = [[3, 7, 1, 9], [5], [2, 8, 8, 30, 31, 4, 6]]
LESSON = DSparkLesson(draft_vocab=V, block=BLOCK, rank=4, anchors=6)


def lively(target: Any, ids: list[int], surely: float) -> BlockStudent:
    """A student whose weights are all far from none, and which is sure of itself."""
    student = BlockStudent(target, torch.tensor(ids), 1, LESSON, 0)
    dice = torch.Generator().manual_seed(4)
    for name, weight in student.network.named_parameters():
        if weight.ndim == 2 and weight.requires_grad:
            scale = 2 * weight.shape[-1] ** -0.5
            weight.data = torch.randn(weight.shape, generator=dice) * scale
        if "confidence" in name:
            weight.data = weight.data * 0.3 + surely * (weight.ndim == 1)
    return student


def text_of(target: Any, ids: list[int], prompt: int) -> SequenceHiddenStates:
    """States as they are kept, but in float32."""
    noted: dict[int, Tensor] = {}
    with RaggedTwin(target, taps=(*choose_taps(target), FINAL_TAP))(None, None, noted) as model:
        mass = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].logsumexp(-1)
    taps = torch.cat([noted[j] for j in choose_taps(target)], -1)[0]
    return SequenceHiddenStates(torch.tensor(ids), prompt, taps, noted[FINAL_TAP][0], mass)


@torch.no_grad()
def test_the_laws_that_are_taught_are_those_that_the_drafter_draws_from():
    """In a batch of texts, behind the last token of each prompt and the tokens drawn there."""
    target, known = network(), list(range(3, 50))
    student = lively(target, known, 3.0)
    draft = BlocksDraft(student.blocks, student.embedding, student.head, student.ids)
    blocks = StockBlockModel(draft)
    shows = CausalModel(target)
    shows.tap(blocks.taps)
    drafter = BlockDrafter(shows, blocks)
    shows.expose_hidden_states(drafter.count_cached_tokens)
    shows.start([prompt[:-1] for prompt in PROMPTS])
    drafter.start([0, 1, 2], PROMPTS, None)
    sampled = [SamplingParams(temperature=1.0)] * 3
    sizes = [5, 3, 4]
    draft = drafter.propose(sizes, Draw([SequenceKey(1, b) for b in range(3)], [9] * 3, sampled))
    assert draft.q is not None and draft.lengths.tolist() == sizes
    drawn = [row[:n] for row, n in zip(draft.tokens.tolist(), sizes, strict=True)]
    texts = [text_of(target, p + new, len(p)) for p, new in zip(PROMPTS, drawn, strict=True)]
    anchors = torch.tensor([[len(p) - 1] * 2 for p in PROMPTS])  # twice, and blind to each other
    lengths = torch.tensor(sizes)[:, None].expand(3, 2)
    states, logits = blocks.predict_block([p[-1] for p in PROMPTS], sizes)
    before = anchors.new_tensor([p[-1] for p in PROMPTS])
    for k, taught in enumerate(student.gather_after_anchors(texts, anchors, lengths)):
        p, q, sure = student.compare(*taught)
        rows, _ = (k < lengths).nonzero(as_tuple=True)
        assert torch.allclose(q.exp(), draft.q[rows, k][:, known], atol=1e-5)
        expected = [target(texts[b].ids[None]).logits[0, anchors[b, 0] + k] for b in rows]
        laws = torch.stack(expected).softmax(-1)[:, known]
        assert torch.allclose(p.exp(), laws, atol=1e-5)
        _, chance, _ = blocks.condition_on_previous(states[:, k], logits[:, k], before, None)
        assert sure is not None and chance is not None
        assert torch.allclose(sure, chance[rows], atol=1e-5)
        before = draft.tokens[:, k]


def cyclic(V: int) -> PreTrainedModel:
    """A target whose next token is nearly always the one behind its last, around a circle."""
    target = tiny.llama(V, num_hidden_layers=6, tie_word_embeddings=False, eos_token_id=None)
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    target.model.norm.weight.data.fill_(1.0)
    at = torch.eye(V, 32)
    target.model.embed_tokens.weight.data.copy_(at)
    target.lm_head.weight.data.copy_(2 * at.roll(1, 0))  # a norm makes its input sqrt(32) long
    return target.requires_grad_(False)


@pytest.mark.prove
def test_blocks_learn_what_lies_ahead(tmp_path: Path) -> None:
    """Around a circle of 12 tokens, of which a bias of rank 1 by the token before knows little."""
    target, count = cyclic(12), 12
    texts = [Example([i % count], [(i + 1 + k) % count for k in range(14)]) for i in range(20)]
    examples = Examples(texts[4:], texts[:4], "circle")
    lesson = DSparkLesson(draft_vocab=count, layers=1, block=4, rank=1, anchors=8)
    recipe = TrainingRecipe(steps=200, batch=4, learning_rate=1e-2, warmup=10, save_every=100)
    options: dict[str, Any] = {"max_bytes": ROOM, "report_states": lambda n: None}
    out, target_folder = tmp_path / "draft", tmp_path / "target"
    summary = teach(target, examples, out, lesson, recipe, lambda *_: None, **options)
    assert min(summary["alpha"]) > 0.95, summary["alpha"]
    target.save_pretrained(target_folder)
    spec = foretoken.load(target_folder, out, runtime="transformers")
    (text,) = spec.generate([[5]], max_new_tokens=20, gamma=4)
    (plain,) = spec.generate([[5]], max_new_tokens=20, gamma=0)
    assert text.tokens == plain.tokens
    assert text.stats.drafted >= 14 and text.stats.alpha == 1


def test_a_mask_is_a_token_that_texts_hardly_have() -> None:
    target = network()
    every = list(range(V))
    assert find_rarest_token(target, {0: every[:50]}) == V - 1
    assert find_rarest_token(target, {0: every, 1: [*every[:20], *every[21:]]}) == 20


def test_a_text_without_new_tokens_and_one_of_a_token_are_read() -> None:
    target, student = network(), lively(network(), list(range(40)), 0.0)
    texts = [text_of(target, [5], 1), text_of(target, [5, 6, 7], 3)]
    counts = [len(taught[0]) for taught in student.gather_positions(texts, None)]
    assert counts == [12, 0, 0, 0, 0]
    assert torch.isfinite(student.compute_loss(texts, LESSON, random.Random(0)))
