"""What EAGLE-3 is taught at each depth is what it says there in use."""

from __future__ import annotations

from pathlib import Path

import torch

from foretoken.models.hidden_states import FINAL_TAP
from foretoken.models.stock.pairs import StockPairModel
from foretoken.train.eagle import EagleLesson
from foretoken.train.hidden_state_dataset import HiddenStateDataset
from students import ROOM, examples, network

DEPTHS = 3


@torch.no_grad()
def test_every_depth_is_taught_what_the_draft_says_there(tmp_path: Path) -> None:
    """Along a text, each place: the draft in use reads true pairs up to there, then tokens of the
    text with states of its own."""
    target = network()
    texts = HiddenStateDataset(tmp_path / "states", target, (2, 3, 3), ROOM)
    learnt, held_out = texts.compute_missing(examples(target, tmp_path / "texts"), lambda n: None)
    student = EagleLesson(draft_vocab=40, depths=DEPTHS).make_student(target, learnt, 0)
    some = [texts.load(n) for n in sorted(learnt)[:3]]
    taught = [student.compare(*x) for x in student.gather_positions(some, None)]
    model, said = StockPairModel(student.network), [[] for _ in range(DEPTHS)]
    for text in some:
        tokens, states = text.ids.tolist(), model.project_states(text.taps.float())
        for i in range(len(tokens) - 1):
            model.permute([])
            model.start([[]])
            read = student.embedding(text.ids[1 : i + 2])
            model.set_next_pairs(torch.cat([read, states[: i + 1]], -1), [i + 1])
            logits = model.score([tokens[1 : i + 2]], [1])
            for k in range(DEPTHS):
                if i + k + 1 >= len(tokens):
                    break
                if k:
                    read = student.embedding(text.ids[i + k + 1 : i + k + 2])
                    model.set_next_pairs(torch.cat([read, model.hidden[0]], -1), [1])
                    logits = model.score([[tokens[i + k + 1]]], [1])
                if i + k + 2 >= text.prompt:
                    said[k].append(logits[0, 0].log_softmax(-1))
    for k in range(DEPTHS):
        torch.testing.assert_close(taught[k].q, torch.stack(said[k]), atol=1e-4, rtol=0)
    whole = [target(text.ids[None]).logits[0].log_softmax(-1)[:, student.ids] for text in some]
    due = [x[max(1, t.prompt - 1) :] for x, t in zip(whole, some, strict=True)]
    torch.testing.assert_close(taught[0].p, torch.cat(due), atol=0.1, rtol=0)  # kept in bfloat16
    assert FINAL_TAP not in texts.taps
