"""What `foretoken generate` says of its texts, from completions made by hand."""

from __future__ import annotations

import json
from types import SimpleNamespace

from foretoken.cli.completion_output import (
    TaskAnswer,
    begin_json,
    describe_departure,
    end_json,
    iter_remarks,
    pair_answers,
    print_speedup,
)
from foretoken.cli.prompts import PromptLine, make_tasks
from foretoken.measurement.races import Comparison
from foretoken.sampling.logprobs import Logprobs


def completion(count: int = 4, reason: str = "length", **known):
    stats = {"bias": known.pop("bias", 0.0), "drafted": known.pop("drafted", 0)}
    stats = SimpleNamespace(**stats, to_dict=lambda known=stats: known)
    known = {"error": None, "logprobs": None, "prompt_logprobs": None, "stop_reason": None} | known
    known |= {"text": None, "seed": (0, 0), "steps": []}
    return SimpleNamespace(tokens=[7] * count, finish_reason=reason, stats=stats, **known)


def made(completions, lines=None, **given) -> list[TaskAnswer]:
    """Each of a prompt of its own, unless `lines` are given."""
    lines = lines or [PromptLine(chr(ord("a") + i)) for i in range(len(completions))]
    requests = [SimpleNamespace(prompt=[1], source=None)] * len(completions)
    return list(pair_answers(make_tasks(lines, given), requests, completions))


def said(completions, lenience: float = 1.0, **given) -> list[str]:
    return list(iter_remarks(made(completions, **given), lenience, as_json=False))


def test_texts_that_the_context_ended():
    four = {"max_new_tokens": 4}
    assert said([completion(4)], **four) == said([completion(3, "stop")], **four) == []
    (two,) = said([completion(4), completion(3)], **four)
    assert two == "the context length ended 1 of 2 outputs before max_new_tokens: prompt 1"
    (many,) = said([completion(1)] * 10, **four)
    assert "10 of 10 outputs" in many and many.endswith("prompt 6, prompt 7, ...")


def test_a_text_without_bias_or_draft_tokens_is_the_target_s():
    still = "lenience 0.5: still the target's distribution"
    assert describe_departure(made([completion(drafted=5)]), 0.5) == still
    assert describe_departure(made([completion()], temperature=1.0), 0.5) == still


def test_bias_is_a_mean_over_all_tokens():
    completions = [completion(3, bias=0.2, drafted=2), completion(1)]
    drawn = describe_departure(made(completions, temperature=1.0), 0.5)
    assert "but 0.1500 away from it (total variation, mean of 4 tokens" in drawn
    assert "2 times it" in drawn


def test_greedy_texts_are_told_apart_from_sampled_ones():
    completions = [completion(4, bias=0.5, drafted=2), completion(4, bias=0.25, drafted=2)]
    lines = [PromptLine("a"), PromptLine("b", sampling={"temperature": 1.0})]
    assert list(iter_remarks(made(completions, lines, max_new_tokens=4), 0.5, as_json=False)) == [
        "lenience 0.5: not the target's greedy output: 2 of 4 tokens are not the target's most "
        "probable token, but each has at least 0.5 times the probability of that token",
        "lenience 0.5: not the target's distribution but 0.2500 away from it (total variation, "
        "mean of 4 tokens); no token has more than 2 times its probability there",
    ]


def test_messages_are_headed_by_the_last():
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where?"}]
    (answer,) = made([completion()], [PromptLine("", messages=turns)])
    assert answer.heading == "==> prompt 0: Where? <=="
    calls = [{"role": "assistant", "content": None, "tool_calls": [{}]}]
    assert made([completion()], [PromptLine("", messages=calls)])[0].heading == "==> prompt 0:  <=="


def test_plain_decoding_is_not_compared_with_itself(capsys):
    def said(gamma, silent):
        print_speedup(Comparison(0.01, 0.009, gamma, 0.02, silent, others=0.0))
        return capsys.readouterr().out

    made = said(None, 0.98)
    assert "only 2% of the steps had draft tokens" in made
    assert "so both are plain decoding" in made and "x" not in made.partition(":")[0]
    assert "with 0.0 draft tokens per step 9.00 ms per token: 1.11x" in said(None, 0.5)
    assert "with gamma 3 9.00 ms per token: 1.11x" in said(3, 1.0)


def test_a_document_has_what_was_given_and_what_was_asked_for(capsys):
    spec = SimpleNamespace(
        target_name="t", draft_name="d", target=SimpleNamespace(runtime="table"), tokenizer=None
    )
    likelihoods = [Logprobs(7, -0.5, ((7, -0.5), (8, -float("inf"))))]
    lines = [PromptLine("a", sampling={"logprobs": 2}), PromptLine("b")]
    completions = [completion(1, logprobs=likelihoods), completion(1, "stop", stop_reason="x")]
    speculation = {"gamma": 2, "rule": "block", "lenience": 1.0}
    passing = begin_json(spec, made(completions, lines, temperature=0.5), speculation)
    next(passing)
    assert '"prompt": 0' in (first := capsys.readouterr().out)  # before the second is there
    assert len(list(passing)) == 1
    end_json(None)
    document = first + capsys.readouterr().out
    assert [line[:12] for line in document.splitlines()[1:-1]] == ['{"prompt": 0', '{"prompt": 1']
    report = json.loads(document)["completions"]
    assert report[0]["params"] == {"temperature": 0.5, "logprobs": 2} and report[0]["prompt"] == 0
    assert report[0]["logprobs"] == [{"token": 7, "logprob": -0.5, "top": [[7, -0.5], [8, None]]}]
    assert report[1]["stop_reason"] == "x" and report[1]["gamma"] == 2
    assert report[1].keys() & {"logprobs", "prompt_logprobs"} == set()
