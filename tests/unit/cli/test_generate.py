"""`foretoken generate` end to end on small models: what is printed where."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import foretoken
from console import TEMPLATE, Run, mistake
from foretoken import slow_log
from foretoken.models.stock.model import CausalModel
from foretoken.speculator import MAX_BATCH_SIZE, Speculator
from tiny import folder, llama

USER = {"role": "user", "content": "Where?"}
PROMPTS = ("It was", "The day")


def lines(path: Path, *rows: object) -> tuple[str, Path]:
    file = path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return "--prompt-file", file


def completions(result) -> list[dict[str, Any]]:
    assert result.code == 0, result.err
    return json.loads(result.out)["completions"]


def test_text_is_streamed(run, pair, spec):
    flags = ("--max-new-tokens", 12, "--temperature", 1, "--seed", 4, "--rule", "block")
    result = run("generate", "It was", *pair, *flags, "--top-k", 50)
    sampled = {"temperature": 1.0, "seed": 4, "gamma": 2, "rule": "block", "top_k": 50}
    (expected,) = spec.generate("It was", max_new_tokens=12, **sampled)
    assert result == (0, expected.text + "\n", "")


def test_json_is_one_document(run, pair, spec, base, monkeypatch):
    monkeypatch.setattr("foretoken.costing.contention.compute_others_share", lambda spans: 0.23)
    (expected,) = spec.generate("It was", max_new_tokens=9)
    args = (*pair[:4], "--gamma", 3, "--max-new-tokens", 9, "--json")
    for extra in ((), ("--show-tokens",), ("--compare",)):
        document = json.loads(run("generate", "It was", *args, *extra).out)
        assert document["target"] == str(base / "target")
        assert document["draft"] == str(base / "draft")
        assert document["runtime"] == "transformers"
        (completion,) = document["completions"]
        assert completion["text"] == expected.text and completion["tokens"] == expected.tokens
        assert completion["seed"] == [0, 0] and completion["finish_reason"] == "length"
        assert completion["stats"]["target_calls"] <= 9 and completion["gamma"] == 3
        assert ("comparison" in document) == ("--compare" in extra)
    comparison = document["comparison"]
    assert comparison["others"] == 0.23
    assert comparison["gamma"] == 3 and 0 <= comparison["alpha"] <= 1 and comparison["c"] > 0
    ratio = comparison["plain_seconds_per_token"] / comparison["seconds_per_token"]
    assert comparison["speedup"] == pytest.approx(ratio)


@pytest.mark.daily(1)
@pytest.mark.parametrize("temperature", [0, 1])
def test_lenience_is_said(run, pair, spec, temperature):
    flags = (*pair, "--max-new-tokens", 12, "--temperature", temperature, "--lenience", 0.2)
    result = run("generate", "It was", *flags)
    away, greedy = (
        r"distribution but 0\.\d+ away from it",
        r"greedy output: \d+ of 12 tokens are not",
    )
    says = f"lenience 0.2: not the target's {away if temperature else greedy}"
    assert result.code == 0 and re.match(says, result.err) and result.err.count("\n") == 1
    options = {"max_new_tokens": 12, "gamma": 2, "temperature": float(temperature)}
    (expected,) = spec.generate("It was", lenience=0.2, **options)
    assert result.out == expected.text + "\n"
    (completion,) = completions(run("generate", "It was", *flags, "--json"))
    assert completion["lenience"] == 0.2
    assert completion["stats"]["bias"] == pytest.approx(expected.stats.bias)
    assert completion["rule"] == "block" and completion["law"] == "not the target's"


def test_compare(run, pair, spec, monkeypatch):
    monkeypatch.setattr("foretoken.costing.contention.compute_others_share", lambda spans: 0.23)
    flags = ("--compare", "--min-new-tokens", 9, "--max-new-tokens", 9)
    result = run("generate", "It was", *pair, *flags)
    *text, measured, predicted, said = result.out.splitlines()
    assert "\n".join(text) == spec.generate("It was", max_new_tokens=9)[0].text
    assert measured.startswith("plain ") and "gamma 2" in measured and measured.endswith("x")
    assert "Theorem 3.8 predicts for these draft tokens" in predicted and "with alpha" in predicted
    assert said.startswith("other processes took 23%")


def test_show_tokens(run, base):
    args = ("--target", base / "target", "--draft", base / "target", "--max-new-tokens", 9)
    result = run("generate", "[/] :smile: It", *args, "--gamma", 2, "--show-tokens")
    lines = result.out.splitlines()
    assert result.code == 0 and lines[0] == "[/] :smile: It"  # neither markup nor emoji
    steps = lines[lines.index("", 1) + 1 :]  # after the text as a whole
    assert [line.split()[0] for line in steps[:3]] == ["1", "2", "3"]
    legend = "accepted draft token  ~rejected draft token~  [target's own]"  # there is no colour
    assert legend in result.out
    assert lines[-1] == "9 tokens in 4 target forwards (2.25 per forward), alpha 1.00"


def test_show_tokens_says_that_automatic_gamma_decoded_plainly(run, base, monkeypatch):
    """As --compare does; not where a gamma is given, nor without a draft."""
    args = ("generate", "It", "--target", base / "target", "--max-new-tokens", 9, "--show-tokens")
    assert "is automatic" not in run(*args, "--draft", "lookup").out
    monkeypatch.setattr("foretoken.cli.completion_output.MIN_SILENT_SHARE", 0.7)
    says = "gamma is automatic: only "
    assert says in " ".join(run(*args, "--draft", "lookup").out.split())
    for more in (("--draft", "lookup", "--gamma", 2), ("--draft", "none")):
        assert "is automatic" not in run(*args, *more).out


def test_a_model_without_a_tokenizer_takes_and_prints_ids(run, base):
    args = ("--target", base / "bare", "--max-new-tokens", 6, "--gamma", 0)
    expected = foretoken.load(base / "bare", "none").generate([1, 2, 3], max_new_tokens=6)[0]
    ids = ",".join(map(str, expected.tokens))
    assert run("generate", "1,2, 3", *args).out == ids + "\n"
    assert run("generate", *args, stdin="1,2,3\n").out == ids + "\n"
    shown = run("generate", "1,2,3", *args, "--show-tokens").out.splitlines()
    assert shown[0] == "1,2,3" and shown[1].split() == [str(token) for token in expected.tokens]
    assert shown[3].split() == ["1", f"[{expected.tokens[0]}]"]
    (completion,) = completions(run("generate", "1,2,3", *args, "--json"))
    assert completion["text"] is None and completion["tokens"] == expected.tokens


def test_standard_input_is_one_prompt(run, base, monkeypatch):
    args = ("--target", base / "target", "--draft", "none", "--max-new-tokens", 6)
    argument = run("generate", "It was\nthe day", *args)
    assert run("generate", *args, stdin="It was\nthe day\n").out == argument.out
    mistake(run("generate", *args, stdin=""), "no prompt")
    mistake(run("generate", *args, stdin=b"\xff\xfe"), "standard input is not valid text")


def test_a_target_by_its_place_or_by_name(run: Run, base: Path) -> None:
    rest = ("--draft", "none", "--max-new-tokens", 8)
    named = run("generate", "--target", base / "target", "Once", *rest)
    assert named.code == 0 and named.out
    assert run("generate", base / "target", "Once", *rest) == named


# Files of prompts


def test_a_file_of_prompts(run, base, spec):
    args = ("--prompt-file", base / "prompts.txt", "--target", base / "target", "--draft", "none")
    result = run("generate", *args, "--max-new-tokens", 6, "--temperature", 1, "--seed", 3)
    texts = spec.generate(PROMPTS, gamma=0, max_new_tokens=6, temperature=1.0, seed=3)
    shown = [f"==> prompt {i}: {p} <==\n{t.text}\n" for i, (p, t) in enumerate(zip(PROMPTS, texts))]  # noqa: B905
    assert result == (0, "\n".join(shown), "")


def test_lines_have_ids_and_options_of_their_own(run, pair, spec, tmp_path):
    rows = {"prompt": "It was", "id": "a"}, {"prompt": [5, 6]}, {"prompt": "It was", "id": [1]}
    file = lines(tmp_path, *rows[:2], rows[2] | {"max_new_tokens": 3})
    long, ids, short = completions(run("generate", *file, *pair, "--max-new-tokens", 9, "--json"))
    assert [each["id"] for each in (long, ids, short)] == ["a", None, [1]]
    assert [each["seed"] for each in (long, ids, short)] == [[0, 0], [0, 1], [0, 2]]
    text, numbers = spec.generate(["It was", [5, 6]], gamma=2, max_new_tokens=9)
    assert long["tokens"] == text.tokens and ids["tokens"] == numbers.tokens
    assert short["tokens"] == text.tokens[:3]
    steps = run("generate", *file, *pair, "--max-new-tokens", 3, "--show-tokens").out
    assert steps.startswith("==> prompt 0 (a): It was <==\n")
    assert "\n\n==> prompt 1: 5,6 <==\n" in steps


def test_many_prompts_show_progress_on_standard_error(run, base, spec, tmp_path):
    prompts = [f"Day {i}" for i in range(MAX_BATCH_SIZE + 2)]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    args = ("--target", base / "target", "--draft", "none", "--max-new-tokens", 3, "--json")
    result = run("generate", "--prompt-file", tmp_path / "prompts.txt", *args, "--temperature", 1)
    assert "generating" in result.err and "100%" in result.err
    texts = spec.generate(prompts, gamma=0, temperature=1.0, max_new_tokens=3)
    assert [c["tokens"] for c in completions(result)] == [text.tokens for text in texts]


def test_bad_lines_fail_before_anything_is_generated(run, pair, tmp_path, monkeypatch):
    monkeypatch.setattr(
        Speculator, "generate_completions", lambda *_, **__: pytest.fail("generated")
    )
    for last, says in (
        ({"prompt": "a" * 500}, "prompt 0 has 500 tokens, but the model's context length is 96"),
        ({"prompt": "a", "suppress_tokens": [999]}, "suppress_tokens names the id 999"),
        ({"messages": [USER]}, "the tokenizer has no chat template; give chat_template="),
    ):
        file = lines(tmp_path, *[{"prompt": "a"}] * (MAX_BATCH_SIZE + 1), last)
        mistake(run("generate", *file, *pair), f"line {MAX_BATCH_SIZE + 2}: {says}")


def test_a_row_that_fails_leaves_the_others(run, pair, spec, tmp_path):
    every = list(range(320))
    rows = {"prompt": "It was"}, {"prompt": "The", "suppress_tokens": every}, {"prompt": "a"}
    file = (*lines(tmp_path, *rows), *pair, "--max-new-tokens", 4)
    shown = run("generate", *file)
    text = spec.generate("It was", gamma=2, max_new_tokens=4)[0].text
    assert shown.code == 1 and shown.out.startswith(f"==> prompt 0: It was <==\n{text}\n")
    assert shown.err.startswith("error: prompt 1: ") and shown.err.count("\n") == 1
    document = run("generate", *file, "--json")
    reasons = [c["finish_reason"] for c in json.loads(document.out)["completions"]]
    assert document.code == 1 and reasons == ["length", "error", "length"]
    assert json.loads(document.out)["completions"][1]["error"] in document.err
    streamed = run("generate", "a", *pair, "--suppress-tokens", ",".join(map(str, every)))
    assert streamed.code == 1 and streamed.out == ""
    assert streamed.err.startswith("error: row 0: ") and streamed.err.count("\n") == 1


# Options


def test_controls_and_a_stop_string_shape_the_text_that_is_streamed(run, pair, spec):
    sampling = {"repetition_penalty": 1.8, "max_new_tokens": 20, "presence_penalty": 0.5}
    flags = [part for n, v in sampling.items() for part in (f"--{n.replace('_', '-')}", v)]
    whole = spec.generate("It was", gamma=2, **sampling)[0].text
    assert run("generate", "It was", *pair, *flags).out == whole + "\n"
    stop = whole[6:9]
    flags += ["--stop", "no such text", "--stop", stop]
    before = whole[: whole.index(stop)]
    assert run("generate", "It was", *pair, *flags).out == before + "\n"
    result = run("generate", "It was", *pair, *flags, "--include-stop-string")
    assert result.out == before + stop + "\n"
    (completion,) = completions(run("generate", "It was", *pair, *flags, "--json"))
    assert completion["stop_reason"] == stop and completion["finish_reason"] == "stop"
    assert completion["params"] == sampling | {"stop_strings": ["no such text", stop]}


def test_several_texts_of_a_prompt(run, pair, spec, tmp_path):
    sampling = {"num_return_sequences": 2, "temperature": 1.0, "max_new_tokens": 6}
    flags = ("--num-return-sequences", 2, "--temperature", 1, "--max-new-tokens", 6)
    file = lines(tmp_path, {"prompt": "It was"}, {"prompt": "The", "num_return_sequences": 1})
    texts = spec.generate("It was", gamma=2, seed=5, **sampling)
    shown = run("generate", *file, *pair, *flags, "--seed", 5).out
    assert shown.startswith(f"==> prompt 0, output 0: It was <==\n{texts[0].text}\n")
    assert f"\n==> prompt 0, output 1: It was <==\n{texts[1].text}\n\n==> prompt 1: The" in shown
    rows = completions(run("generate", *file, *pair, *flags, "--seed", 5, "--json"))
    assert [c["tokens"] for c in rows[:2]] == [c.tokens for c in texts]
    assert [(c["prompt"], c["seed"]) for c in rows] == [(0, [5, 0]), (0, [5, 1]), (1, [5, 2])]


def test_what_was_given_makes_the_text_again(run, pair, tmp_path):
    flags = ("--temperature", 0.8, "--logit-bias", '{"5": 2.5}', "--bad-words-ids", "[[7, 8]]")
    flags += ("--sequence-bias", "[[[9], -1.5]]", "--exponential-decay", "3,1.1")
    flags += ("--suppress-tokens", "1,2", "--stop-token-ids", "300", "--max-new-tokens", 12)
    (first,) = completions(run("generate", "It was", *pair, *flags, "--json"))
    file = lines(tmp_path, {"prompt": "It was", **first["params"]})
    (again,) = completions(run("generate", *file, *pair, "--json"))
    assert again["tokens"] == first["tokens"] and again["params"] == first["params"]


def test_logprobs_are_in_json(run, pair, spec):
    flags = (*pair, "--max-new-tokens", 3, "--logprobs", 1, "--prompt-logprobs", 0, "--json")
    sampling = {"max_new_tokens": 3, "logprobs": 1, "prompt_logprobs": 0}
    (completion,) = spec.generate("It was", gamma=2, **sampling)
    (row,) = completions(run("generate", "It was", *flags))
    for name in ("logprobs", "prompt_logprobs"):
        known = getattr(completion, name)
        assert [each["token"] for each in row[name]] == [each.token for each in known]
        logprobs = [each["logprob"] for each in row[name]]
        assert logprobs == pytest.approx([each.logprob for each in known], abs=1e-3)


def test_messages(run, pair, base, spec, tmp_path):
    flags = (*pair, "--chat-template", base / "chat.jinja", "--max-new-tokens", 4)
    how: dict[str, Any] = {"gamma": 2, "max_new_tokens": 4}
    talk = [{"role": "system", "content": "Be brief."}, USER]
    briefly, reply = (
        spec.generate(each, chat_template=TEMPLATE, **how)[0].text for each in (talk, [USER])
    )
    plain = spec.generate("Where?", **how)[0].text
    shown = run("generate", "Where?", "--chat", "--system", "Be brief.", *flags)
    assert shown.out == briefly + "\n"
    file = lines(tmp_path, {"messages": [USER], "id": "m"}, {"prompt": "Where?"})
    shown = run("generate", *file, *flags).out
    assert shown == f"==> prompt 0 (m): Where? <==\n{reply}\n\n==> prompt 1: Where? <==\n{plain}\n"
    assert run("generate", *file, *flags, "--chat").out.count(reply) == 2


@pytest.mark.prove
@pytest.mark.real_costs
def test_a_long_measurement_says_so(run, pair, tmp_path, monkeypatch):
    """Once: the next command knows what steps cost, whatever the machine did meanwhile."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(slow_log, "LOG_AFTER_SECONDS", 0.0)
    err = run("generate", "It was", *pair[:4]).err
    assert re.search(r"^measuring step costs.*: target, draft, greedy, batch size 1$", err, re.M)
    assert "loading target\n" in err and "loading the draft draft\n" in err
    assert "measuring" not in run("generate", "It was", *pair[:4]).err


# Ctrl-C


@pytest.mark.prove
def test_ctrl_c_keeps_what_was_generated(tmp_path):
    """A long text: interrupted once it is under way. Only a conversion is told besides."""
    target = folder(tmp_path / "long", llama(64, context=10**6, eos_token_id=None))
    command = [sys.executable, "-m", "foretoken", "generate", "1,2,3", "--target", str(target)]
    with subprocess.Popen(
        [*command, "--draft", "none", "--max-new-tokens", "900000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in background
    ) as process:
        assert process.stdout
        head = process.stdout.read(20)  # it is under way
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=60)
    assert process.returncode == 130
    tokens = [int(token) for token in (head + rest).strip().split(",") if token]
    expected = foretoken.load(target, "none").generate([1, 2, 3], max_new_tokens=5)[0].tokens
    assert tokens[:5] == expected
    assert re.fullmatch(r"((converted|measured|\w+ing) .*\n)*\ninterrupted after \d+ tokens\n", err)


def test_ctrl_c_in_a_batch_prints_every_completion(run, base, monkeypatch):
    calls: list[int] = []
    foretoken.load(base / "target", "none")  # the self-check is over before calls are counted
    original = CausalModel.score

    def score(self, *args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(CausalModel, "score", score)
    args = ("--target", base / "target", "--draft", "none", "--max-new-tokens", 9, "--json")
    result = run("generate", "--prompt-file", base / "prompts.txt", *args)
    interrupted = json.loads(result.out)["completions"]
    assert result.code == 130 and [len(c["tokens"]) for c in interrupted] == [3, 3]
    assert {c["finish_reason"] for c in interrupted} == {"interrupted"}


def test_ctrl_c_between_two_texts_leaves_whole_json(run, base, monkeypatch):
    def some(spec, *_):
        yield from spec.generate(["It was"], max_new_tokens=2)
        raise KeyboardInterrupt

    args = ("--target", base / "target", "--draft", "none", "--json")
    monkeypatch.setattr("foretoken.cli.generate._generate_completions", some)
    result = run("generate", "--prompt-file", base / "prompts.txt", *args)
    assert result.code == 130 and len(json.loads(result.out)["completions"]) == 1


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), SystemExit(130)])
def test_a_signal_within_an_import_is_quiet(run, monkeypatch, interruption):
    """Python 3.11 wraps what a signal's handler raises while a class is being made."""

    class Attribute:
        def __set_name__(self, *_):
            raise interruption

    def load(*args, **options):
        type("Made", (), {"attribute": Attribute()})

    monkeypatch.setattr("foretoken.loading.load.load_checked", load)
    result = run("generate", "text")
    assert result.code == 130 and result.out == "" and "Traceback" not in result.err
