"""The draft that ships for SmolLM2-135M-Instruct, trained on a GPU in minutes: the target writes
texts behind all prompts at once, its states stay in memory, and batches are of many texts.

What is learnt is that of `foretoken train eagle` and `dspark`; the steps are as many as the time
allows, and as long for few tokens as for many: launches take the time. Each draft is written as
trained (NAME) and in eight bits (NAME-int8).

    python benchmarks/smollm2_draft.py prompts --own 0 --target FILE.gguf --data FOLDER \\
        --out prompts.jsonl
    python benchmarks/gpu/train_draft.py FILE.gguf prompts.jsonl --eagle 240 --dspark 90 --out OUT
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import gpu
from foretoken.loading.sources import find_source, load_tokenizer
from foretoken.models.stock.pair_files import dequantize
from foretoken.train import student as student_module
from foretoken.train.dspark import DSparkLesson
from foretoken.train.eagle import EagleLesson, EagleStudent
from foretoken.train.hidden_state_dataset import SequenceHiddenStates
from foretoken.train.loop import make_optimizers
from foretoken.train.student import Lesson, Student, choose_taps
from smollm2_draft import BEFORE, lines, pack

ROOM = 3_000_000  # tokens of texts that are written at once: 70 GB of keys and values
MOST = 8192  # texts
PREFILLED = 1 << 16  # tokens of prompts in a pass
CHOSEN = 2048  # rows whose logits are made at a time
BEHIND = 48  # tokens that are kept behind the end of an answer
LONGEST = 1400  # tokens of a prompt
HELD_OUT = 192  # texts
WARMUP, DECAY, RATE = 200, 0.3, 3e-3  # steps, share of the time, Muon's and AdamW's learning rate
student_module.POSITIONS_PER_CHUNK = 1 << 14  # places whose distributions are made at a time


class Text(NamedTuple):
    ids: list[int]
    prompt: int  # tokens of it


class Writer:
    """Plain decoding by a Llama, in bfloat16, of as many prompts at once as there is room for."""

    def __init__(self, network: Any) -> None:
        self.network = copy.deepcopy(network).bfloat16()
        config = network.config
        self.groups, self.dim = config.num_key_value_heads, config.head_dim

    def __call__(self, prompts: list[list[int]], hot: list[bool], length: int) -> list[list[int]]:
        """Return `length` tokens behind each prompt: at temperature 1 where `hot`, else greedy."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        texts: dict[int, list[int]] = {}
        while order:
            count = 1
            while count < min(MOST, len(order)) and (
                (count + 1) * (len(prompts[order[count]]) + length) <= ROOM
            ):
                count += 1
            some, order = order[:count], order[count:]
            new = self._batch(
                [prompts[i] for i in some], torch.tensor([hot[i] for i in some]), length
            )
            texts |= dict(zip(some, new, strict=True))
            torch.cuda.empty_cache()  # what the recorded step holds
        return [texts[i] for i in range(len(prompts))]

    @torch.no_grad()
    def _batch(self, prompts: list[list[int]], hot: Tensor, length: int) -> list[list[int]]:
        """Prefill the prompts, then replay one recorded step per token: an eager one is some
        thousand launches, which take ten times as long as their work."""
        B, L = len(prompts), max(map(len, prompts))
        T = wide(L + length)
        starts = torch.tensor([L - len(prompt) for prompt in prompts])
        ids = torch.tensor([[0] * (L - len(prompt)) + prompt for prompt in prompts])
        columns = torch.arange(T)
        real = columns >= starts[:, None]
        shape = (2, len(self.network.model.layers), B, self.groups, T, self.dim)
        cached = torch.zeros(shape, dtype=torch.bfloat16)
        n = max(1, PREFILLED // L)
        last = torch.cat([
            self._prefill(ids[i : i + n], starts[i : i + n], cached[:, :, i : i + n])
            for i in range(0, B, n)
        ])  # fmt: skip
        tokens, at = torch.empty(B, length + 1, dtype=torch.long), torch.tensor([L - 1])
        drawn = torch.empty(B, 1, dtype=torch.long)

        def choose(hidden: Tensor) -> None:
            for some in (slice(i, i + CHOSEN) for i in range(0, B, CHOSEN)):
                logits = self.network.lm_head(hidden[some]).float()
                noise = torch.empty_like(logits).exponential_().clamp_(min=1e-30).log_()
                picked = torch.where(hot[some, None], logits - noise, logits).argmax(-1)
                drawn[some] = picked[:, None]
            tokens.index_copy_(1, at - (L - 1), drawn)
            at.add_(1)

        def step() -> None:
            seen = (real & (columns <= at))[:, None]
            choose(self._forward(drawn, at - starts[:, None], seen, cached, at)[:, -1])

        choose(last)
        step()  # unrecorded: libraries set themselves up
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(2, length):
            graph.replay()
        return tokens[:, :length].tolist()

    def _prefill(self, ids: Tensor, starts: Tensor, cached: Tensor) -> Tensor:
        L = ids.shape[1]
        columns = torch.arange(L)
        real = columns >= starts[:, None]
        causal = columns <= columns[:, None]
        seen = causal & real[:, None] | torch.eye(L, dtype=torch.bool)  # NaN where nothing is
        positions = (columns - starts[:, None]).clamp(min=0)
        return self._forward(ids, positions, seen, cached, columns)[:, -1]

    def _forward(
        self, ids: Tensor, positions: Tensor, seen: Tensor, cached: Tensor, at: Tensor
    ) -> Tensor:
        """States `[B, n, H]` of tokens at the columns `at [n]`, where `seen` is `[B, n, T]`; heads
        of a group are further queries."""
        model, n, end = self.network.model, ids.shape[1], seen.shape[-1]
        states = model.embed_tokens(ids)
        rope = model.rotary_emb(states, positions)
        mask = seen.repeat(1, model.config.num_attention_heads // self.groups, 1)[:, None]
        for layer, keys, values in zip(model.layers, *cached, strict=True):
            read, own = layer.input_layernorm(states), layer.self_attn
            q, k, v = (
                project(read).unflatten(-1, (-1, self.dim)).transpose(1, 2)
                for project in (own.q_proj, own.k_proj, own.v_proj)
            )
            q, k = apply_rotary_pos_emb(q, k, *rope)
            keys.index_copy_(2, at, k)
            values.index_copy_(2, at, v)
            q = q.unflatten(1, (self.groups, -1)).flatten(2, 3)
            made = nn.functional.scaled_dot_product_attention(
                q, keys[:, :, :end], values[:, :, :end], attn_mask=mask
            )
            made = made.unflatten(2, (-1, n)).permute(0, 3, 1, 2, 4).flatten(2)
            states = states + own.o_proj(made)
            states = states + layer.mlp(layer.post_attention_layernorm(states))
        return model.norm(states)


def wide(length: int) -> int:
    return -(-length // 64) * 64


def written(args: argparse.Namespace, network: Any, words: Any, dice: random.Random) -> list[Text]:
    """The target's own texts behind the prompts and behind instructions of its own, half of them
    greedy; of what it goes on with behind an answer's end, a little."""
    write, end = Writer(network), network.config.eos_token_id
    sources = [json.loads(line)["source"] for line in lines(args.prompts)]
    if args.own:
        system = sources[0].split(BEFORE)[0] + BEFORE
        new = write([words(system).input_ids] * args.own, [True] * args.own, 96)
        asked = {words.decode(ids[: ids.index(end)]).strip() for ids in new if end in ids}
        behind = "<|im_end|>\n<|im_start|>assistant\n"
        sources += [f"{system}{text}{behind}" for text in sorted(asked) if len(text) > 8]
    prompts = [ids for ids in words(sources).input_ids if len(ids) <= LONGEST]
    dice.shuffle(prompts)
    texts = write(prompts, [i % 2 == 1 for i in range(len(prompts))], args.length)
    cut = [ids[: ids.index(end) + BEHIND] if end in ids else ids for ids in texts]
    return [Text([*a, *b], len(a)) for a, b in zip(prompts, cut, strict=True)]


@torch.no_grad()
def with_states(network: Any, texts: list[Text]) -> list[SequenceHiddenStates]:
    """The same with the target's states, by float32 networks in TF32."""
    taps, result = choose_taps(network), dict[int, SequenceHiddenStates]()
    for some in batches(list(range(len(texts))), texts, 32_000):
        ids = pad_sequence([torch.tensor(texts[i].ids) for i in some], batch_first=True)
        out = network.model(ids, output_hidden_states=True, use_cache=False)
        hidden, states = out.last_hidden_state, [out.hidden_states[j] for j in taps]
        for row, i in enumerate(some):
            n = len(texts[i].ids)
            mass = network.lm_head(hidden[row, :n]).logsumexp(-1)
            both = torch.cat([x[row, :n] for x in states], -1), hidden[row, :n]
            own = (x.bfloat16() for x in both)
            result[i] = SequenceHiddenStates(ids[row, :n].clone(), texts[i].prompt, *own, mass)
    return [result[i] for i in range(len(texts))]


def batches(order: list[int], texts: list[Any], tokens: int) -> Iterator[list[int]]:
    """Numbers of texts of near lengths, so many tokens at a time with padding."""
    some: list[int] = []
    for i in sorted(order, key=lambda i: len(texts[i].ids)):
        if some and (len(some) + 1) * len(texts[i].ids) > tokens:
            yield some
            some = []
        some.append(i)
    if some:
        yield some


def begun(network: Any, folder: Path, lesson: EagleLesson) -> EagleStudent:
    """An EAGLE-3 draft with the weights and the tokens of one in eight bits."""
    held = dequantize(load_file(folder / "model.safetensors"))
    ids = held["d2t"] + torch.arange(len(held["d2t"]), device="cpu")
    student = EagleStudent(network, ids.to(gpu.DEVICE), lesson, 0)
    for name, weight in student.network.state_dict().items():
        stored = student.get_stored_name(name)
        if stored in held:  # all but the output layer, which is the target's
            weight.copy_(held[stored])
    return student


def train(
    name: str,
    student: Student,
    texts: list[SequenceHiddenStates],
    lesson: Lesson,
    args: argparse.Namespace,
    seconds: float,
) -> dict[str, Any]:
    """Train for so many seconds, write the draft, and return how it went."""
    held = {i: texts[i].ids.tolist() for i in range(HELD_OUT)}
    learnt, dice = list(range(HELD_OUT, len(texts))), random.Random(0)
    steps = make_optimizers(student.network, RATE)
    start, step, total, shown, log = time.time(), 0, 0, 0.0, list[dict[str, Any]]()
    queue: list[list[int]] = []
    while (past := time.time() - start) < seconds:
        if not queue:
            dice.shuffle(learnt)
            groups = [learnt[i : i + 1024] for i in range(0, len(learnt), 1024)]
            queue = [some for group in groups for some in batches(group, texts, args.tokens)]
            dice.shuffle(queue)
        rate = RATE * min(1, (step + 1) / WARMUP, (1 - past / seconds) / DECAY)
        some = [texts[i] for i in queue.pop()]
        with torch.autocast(gpu.DEVICE, torch.bfloat16):
            loss = student.compute_loss(some, lesson, random.Random(step))
        loss.backward()
        nn.utils.clip_grad_norm_(student.network.parameters(), 1.0)
        for optimizer in steps:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        step, total = step + 1, total + sum(len(t.ids) for t in some)
        if past - shown > seconds / 8:
            shown = past
            log.append(measured(student, texts, held) | {"seconds": past, "step": step})
            log[-1] |= {"loss": loss.item(), "tokens": total}
            print(name, log[-1], flush=True)
    log.append(measured(student, texts, held) | {"step": step, "tokens": total})
    print(name, log[-1], flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    student.save(args.out / name)
    pack(argparse.Namespace(draft=args.out / name, out=args.out / f"{name}-int8"))
    return {"log": log, "parameters": sum(x.numel() for x in student.network.parameters())}


def measured(
    student: Student, texts: list[SequenceHiddenStates], held: dict[int, list[int]]
) -> dict[str, Any]:
    in_memory: Any = SimpleNamespace(read=texts.__getitem__)
    with torch.autocast(gpu.DEVICE, torch.bfloat16):
        alpha = student.measure_alpha(in_memory, held, 16)
    return {"alpha": [round(x, 4) for x in alpha]}


def main() -> None:
    parser = gpu.parser(__doc__)
    parser.add_argument("target")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--own", type=int, default=8000, help="instructions that the target writes")
    parser.add_argument("--length", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--tokens", type=int, default=24_000, help="of a batch, with padding")
    parser.add_argument("--vocab", type=int, default=8192, help="of the draft")
    parser.add_argument("--depths", type=int, default=4, help="draft tokens that EAGLE-3 learns")
    parser.add_argument("--begin", type=Path, help="an EAGLE-3 draft to go on from, in eight bits")
    parser.add_argument("--eagle", type=float, default=240.0, help="seconds")
    parser.add_argument("--dspark", type=float, default=0.0, help="seconds")
    parser.add_argument("--end", type=float, help="seconds from the start when training has ended")
    args = parser.parse_args()
    gpu.need()
    start = time.time()

    def said(*what: object) -> None:
        print(f"{time.time() - start:.0f} s:", *what, flush=True)

    words = load_tokenizer(args.target, None, False)
    network: Any = find_source(args.target, None, False).load_network(
        torch.float32, torch.device("cpu")
    )
    network = network.to(gpu.DEVICE).eval().requires_grad_(False)
    torch.set_default_device(gpu.DEVICE)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # plans anew for each batch's shape: 0.3 s of 0.4
    said("target")
    texts = written(args, network, words, random.Random(0))
    said(len(texts), "texts", sum(len(t.ids) for t in texts), "tokens", "of prompts",
         sum(t.prompt for t in texts))  # fmt: skip
    kept = with_states(network, texts)
    said("states")
    counted = {i: t.ids[t.prompt :] for i, t in enumerate(texts)}
    lessons = {"eagle": EagleLesson(draft_vocab=args.vocab, depths=args.depths)}
    blocks = DSparkLesson(draft_vocab=args.vocab, intermediate=768, rank=32)  # 7.2 MB
    lessons |= {"dspark": blocks}
    results = {"texts": len(texts), "tokens": sum(len(t.ids) for t in texts)}
    for name, lesson in lessons.items():
        if getattr(args, name):
            student = (
                begun(network, args.begin, lesson)
                if args.begin and isinstance(lesson, EagleLesson)
                else lesson.make_student(network, counted, 0)
            )
            student.network.to(gpu.DEVICE)
            student.output_weight = student.output_weight.bfloat16()
            seconds = getattr(args, name)
            if args.end:
                seconds = min(seconds, start + args.end - time.time())
            results[name] = train(name, student, kept, lesson, args, seconds)
            said(name)
            del student
    gpu.save("gpu-train-draft", args.out, results)


if __name__ == "__main__":
    main()
