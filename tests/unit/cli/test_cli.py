"""The command line as a user meets it: what is printed where, and one line for every mistake.

In this process but for the few that need another: `main` is called with arguments, as the console
script does.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import foretoken
from console import Result, Run, mistake
from foretoken import slow_log
from foretoken.speculator import MAX_ROWS, Speculator
from tiny import TEXT, byte_level, folder, llama, t5


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, console: Run) -> Run:
    """Call the console script; `stdin`: what is piped in, None for a terminal."""

    def call(*args: object, stdin: str | bytes | None = None, closed: bool = False) -> Result:
        data = stdin.encode() if isinstance(stdin, str) else stdin or b""
        piped = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
        piped.isatty = lambda: stdin is None
        monkeypatch.setattr(sys, "stdin", None if closed else piped)
        return console(*args)

    return call


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `target`, `draft`, and `bare` without a tokenizer; a text."""
    base = tmp_path_factory.mktemp("cli")
    folder(base / "target", llama(320), byte_level())
    folder(base / "draft", llama(320, seed=1, num_hidden_layers=1), byte_level())
    folder(base / "bare", llama(64))
    folder(base / "t5", t5(320), byte_level())
    (base / "text").mkdir()
    (base / "text" / "book.txt").write_text(TEXT * 40, encoding="utf-8")
    return base


def library(base: Path, prompt: str, **options) -> foretoken.Completion:
    return foretoken.load(base / "target", base / "draft").generate(prompt, **options)[0]


# generate


def test_text_is_streamed(run, base):
    args = ("--target", base / "target", "--draft", base / "draft", "--max-new-tokens", 12)
    result = run("generate", "It was", *args)
    assert result.code == 0 and result.err == ""
    assert result.out == library(base, "It was", max_new_tokens=12).text + "\n"
    args = (*args, "--temperature", 1, "--seed", 4, "--gamma", 2, "--rule", "block", "--top-k", 50)
    sampled = {"temperature": 1.0, "seed": 4, "gamma": 2, "rule": "block", "top_k": 50}
    expected = library(base, "It was", max_new_tokens=12, **sampled).text
    assert run("generate", "It was", *args).out == expected + "\n"


def test_coupled_draws(run, base):
    """A seed gives one text, whatever gamma."""
    args = ("--target", base / "target", "--draft", base / "draft", "--max-new-tokens", 9)
    args += ("--dtype", "float64", "--runtime", "transformers")
    args += ("--rule", "coupled", "--temperature", 1, "--seed", 3, "--json")
    outputs = [json.loads(run("generate", "It was", *args, "--gamma", g).out) for g in (0, 3)]
    plain, fast = (document["completions"][0] for document in outputs)
    assert plain["tokens"] == fast["tokens"] and fast["stats"]["drafted"]


def test_json_is_one_document(run, base):
    args = ("--target", base / "target", "--draft", base / "draft", "--max-new-tokens", 9)
    expected = library(base, "It was", max_new_tokens=9)
    for extra in ((), ("--show-tokens",), ("--compare",)):
        result = run("generate", "It was", *args, "--json", *extra)
        assert result.code == 0
        document = json.loads(result.out)
        assert document["target"] == str(base / "target")
        assert document["draft"] == str(base / "draft")
        assert document["runtime"] == "transformers"
        (completion,) = document["completions"]
        assert completion["text"] == expected.text and completion["tokens"] == expected.tokens
        assert completion["seed"] == [0, 0] and completion["finish_reason"] == "length"
        assert completion["stats"]["target_calls"] <= 9
        assert ("comparison" in document) == ("--compare" in extra)


@pytest.mark.daily(1)
@pytest.mark.parametrize("temperature", [0, 1])
def test_lenience_is_said(run, base, temperature):
    args = ("--target", base / "target", "--draft", base / "draft", "--max-new-tokens", 12)
    args = (*args, "--gamma", 3, "--temperature", temperature, "--lenience", 0.2)
    result = run("generate", "It was", *args)
    away, greedy = r"distribution but 0\.\d+ away from it", r"greedy text: \d+ of 12 tokens are not"
    says = f"lenience 0.2: not the target's {away if temperature else greedy}"
    assert result.code == 0 and re.match(says, result.err) and result.err.count("\n") == 1
    options = {"max_new_tokens": 12, "gamma": 3, "temperature": float(temperature)}
    expected = library(base, "It was", lenience=0.2, **options)
    assert result.out == expected.text + "\n"
    (completion,) = json.loads(run("generate", "It was", *args, "--json").out)["completions"]
    assert completion["lenience"] == 0.2
    assert completion["stats"]["bias"] == expected.stats.bias
    assert completion["rule"] == "block" and completion["law"] == "not the target's"


@pytest.mark.daily(1)
@pytest.mark.parametrize("temperature", [0, 1])
def test_lenience_that_nothing_came_of_is_said_too(run, base, temperature):
    """Without a draft token the text is the target's."""
    args = ("--target", base / "target", "--draft", base / "draft", "--max-new-tokens", 12)
    args = (*args, "--gamma", 0, "--temperature", temperature)
    result = run("generate", "It was", *args, "--lenience", 0.2)
    assert result.code == 0 and result.err == "lenience 0.2: still the target's distribution\n"
    for extra in ((), ("--lenience", 0.2)):
        document = json.loads(run("generate", "It was", *args, "--json", *extra).out)
        assert document["completions"][0]["law"] == "the target's"


@pytest.mark.prove
def test_greedy_lenience_that_let_nothing_else_pass(run, base):
    """The draft is the target: every token is its first choice."""
    args = ("--target", base / "target", "--draft", base / "target", "--max-new-tokens", 12)
    result = run("generate", "It was", *args, "--gamma", 3, "--lenience", 0.2)
    assert result.err == "lenience 0.2: still the target's distribution\n"


def test_compare(run, base, monkeypatch):
    monkeypatch.setattr("foretoken.costing.contention.share", lambda spans: 0.23)
    args = ("--target", base / "target", "--draft", base / "draft", "--max-new-tokens", 9)
    result = run("generate", "It was", *args, "--compare", "--gamma", 2)
    *text, measured, predicted, said = result.out.splitlines()
    assert "\n".join(text) == library(base, "It was", max_new_tokens=9).text
    assert measured.startswith("plain ") and "gamma 2" in measured and measured.endswith("x")
    assert (
        "Theorem 3.8 for the draft tokens made" in predicted
        and "with alpha" in predicted
        and said.startswith("other processes took 23%")
    )
    document = json.loads(run("generate", "It was", *args, "--compare", "--gamma", 2, "--json").out)
    comparison = document["comparison"]
    assert comparison["others"] == 0.23
    assert comparison["gamma"] == 2 and 0 <= comparison["alpha"] <= 1 and comparison["c"] > 0
    ratio = comparison["plain_seconds_per_token"] / comparison["seconds_per_token"]
    assert comparison["speedup"] == pytest.approx(ratio)


def test_show_tokens(run, base):
    args = ("--target", base / "target", "--draft", base / "target", "--max-new-tokens", 9)
    result = run("generate", "[/] :smile: It", *args, "--gamma", 2, "--show-tokens")
    lines = result.out.splitlines()
    assert result.code == 0 and lines[0] == "[/] :smile: It"  # neither markup nor emoji
    runs = lines[lines.index("", 1) + 1 :]  # behind the text as a whole
    assert [line.split()[0] for line in runs[:3]] == ["1", "2", "3"]
    assert (
        "accepted draft token  ~rejected draft token~  [target's own]" in result.out
    )  # there is no colour
    assert lines[-1] == "9 tokens in 4 target runs (2.25 a run), alpha 1.00"


def test_show_tokens_says_that_automatic_gamma_decoded_plainly(run, base, monkeypatch):
    """As --compare does; not where a gamma is given, nor without a draft."""
    args = ("generate", "It", "--target", base / "target", "--max-new-tokens", 9, "--show-tokens")
    draft = ("--draft", base / "target")
    assert "is automatic" not in run(*args, "--draft", "lookup").out  # two steps of eight
    monkeypatch.setattr("foretoken.cli.answer.RARELY", 0.7)
    says = "gamma is automatic: it made draft tokens in 25% of the steps, as elsewhere there were"
    assert says in " ".join(run(*args, "--draft", "lookup").out.split())
    assert "is automatic" not in run(*args, *draft, "--gamma", 2).out
    assert "is automatic" not in run(*args, "--draft", "none").out


def test_a_model_without_a_tokenizer_takes_and_prints_ids(run, base):
    args = ("--target", base / "bare", "--max-new-tokens", 6, "--gamma", 0)
    expected = foretoken.load(base / "bare", "none").generate([1, 2, 3], max_new_tokens=6)[0]
    ids = ",".join(map(str, expected.tokens))
    assert run("generate", "1,2, 3", *args).out == ids + "\n"
    assert run("generate", *args, stdin="1,2,3\n").out == ids + "\n"
    shown = run("generate", "1,2,3", *args, "--show-tokens").out.splitlines()
    assert shown[0] == "1,2,3" and shown[1].split() == [str(token) for token in expected.tokens]
    assert shown[3].split() == ["1", f"[{expected.tokens[0]}]"]
    document = json.loads(run("generate", "1,2,3", *args, "--json").out)
    assert document["completions"][0]["text"] is None
    assert document["completions"][0]["tokens"] == expected.tokens
    mistake(run("generate", "one,2", *args), "'one,2' is not ids separated by commas")
    mistake(run("generate", "1,64", *args), "prompt 0 holds the id 64")


def test_standard_input_is_one_prompt(run, base):
    args = ("--target", base / "target", "--draft", "none", "--max-new-tokens", 6)
    argument = run("generate", "It was\nthe day", *args)
    assert run("generate", *args, stdin="It was\nthe day\n").out == argument.out
    mistake(run("generate", *args, stdin=""), "no prompt")
    mistake(run("generate", *args), "no prompt")
    mistake(run("generate", *args, closed=True), "no prompt")
    mistake(run("generate", "a\udcffb", *args), "prompt 0 is not valid text")
    mistake(run("generate", *args, stdin=b"\xff\xfe"), "standard input is no text")


def test_a_file_of_prompts(run, base, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("It was\n\nThe day\n")
    args = ("--target", base / "target", "--draft", "none", "--max-new-tokens", 6)
    result = run("generate", "--prompt-file", file, *args, "--temperature", 1, "--seed", 3)
    spec = foretoken.load(base / "target", "none")
    completions = spec.generate(["It was", "The day"], max_new_tokens=6, temperature=1.0, seed=3)
    texts = zip(("It was", "The day"), completions, strict=True)
    shown = [f"==> prompt {i}: {p} <==\n{c.text}\n" for i, (p, c) in enumerate(texts)]
    assert result.out == "\n".join(shown) and result.err == ""
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    mistake(run("generate", "--prompt-file", empty, *args), "holds no prompt")
    mistake(run("generate", "--prompt-file", tmp_path / "no", *args), "cannot be read")
    mistake(run("generate", "--prompt-file", tmp_path, *args), "cannot be read")
    mistake(run("generate", "text", "--prompt-file", file, *args), "not both")
    mistake(
        run("generate", "--prompt-file", file, *args, "--compare"),
        "--compare takes one prompt and one text",
    )


def test_jsonl(run, base, tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "It was", "id": "a"}, {"prompt": [5, 6]}, {"prompt": "The", "id": [1]}]
    file.write_text("\n".join(map(json.dumps, lines)))
    args = ("--target", base / "target", "--draft", "none", "--max-new-tokens", 6)
    document = json.loads(run("generate", "--prompt-file", file, *args, "--json").out)
    assert [c["id"] for c in document["completions"]] == ["a", None, [1]]
    assert [c["seed"] for c in document["completions"]] == [[0, 0], [0, 1], [0, 2]]
    completion = foretoken.load(base / "target", "none").generate([5, 6], max_new_tokens=6)[0]
    assert document["completions"][1]["tokens"] == completion.tokens


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": ', "line 3: it is '{\"prompt\": ', which is no JSON"),
        ("text", "line 3: it is 'text', which is no JSON"),
        ('{"id": 3}', "line 3: give a prompt or messages"),
        ('{"prompt": 5}', "line 3: prompt"),
        ('{"prompt": [1, "a"]}', "line 3: prompt"),
        ('{"prompt": "a", "more": 1}', "line 3: more is unknown here"),
        ('{"prompt": ' + "[" * 100_000, "which is no JSON: maximum recursion depth"),
        ('{"prompt": ""}', "line 3: the prompt is empty"),
        ('{"prompt": []}', "line 3: the prompt is empty"),
        ("[]", "line 3: it is no object"),
        ('{"prompt": "a", "id": NaN}', "which is no JSON: Out of range float values"),
    ],
)
def test_bad_lines_of_jsonl_are_told_by_number(run, base, tmp_path, line, says):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n\n' + line + "\n")
    mistake(run("generate", "--prompt-file", file, "--target", base / "target"), says)


def test_many_prompts_show_progress_on_standard_error(run, base, tmp_path):
    file, many = tmp_path / "prompts.txt", MAX_ROWS + 2
    file.write_text("\n".join(f"Day {i}" for i in range(many)))
    args = ("--target", base / "target", "--draft", "none", "--max-new-tokens", 3)
    options = {"temperature": 1.0, "max_new_tokens": 3}
    result = run("generate", "--prompt-file", file, *args, "--temperature", 1, "--json")
    assert "generating" in result.err and "100%" in result.err
    completions = json.loads(result.out)["completions"]
    texts = foretoken.load(base / "target", "none").generate(
        [f"Day {i}" for i in range(many)], **options
    )
    assert [c["tokens"] for c in completions] == [c.tokens for c in texts]


def test_a_bad_prompt_among_many_fails_before_anything_is_generated(
    run, base, tmp_path, monkeypatch
):
    generated = lambda *args, **options: pytest.fail("generated")  # noqa: E731
    monkeypatch.setattr(Speculator, "completions", generated)
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "a"}] * (MAX_ROWS + 1) + [{"prompt": "a" * 500}]
    file.write_text("\n".join(map(json.dumps, rows)))
    args = ("--target", base / "target", "--draft", "none")
    mistake(
        run("generate", "--prompt-file", file, *args),
        f"line {MAX_ROWS + 2}: prompt 0 has 500 tokens",
    )


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--top-p", "0"], "top_p is 0.0; give a number in (0, 1]"),
        (["--top-p", "1.5"], "top_p is 1.5"),
        (["--top-k", "-3"], "top_k is -3"),
        (["--min-p", "-0.1"], "min_p is -0.1"),
        (["--gamma", "-1"], "gamma is -1"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--seed", "-1"], "seed is -1"),
        (["--rule", "none"], "rule is 'none'"),
        (["--lenience", "0"], "lenience is 0.0; give a number from 1e-30 to 1"),
        (["--dtype", "float31"], "dtype is 'float31'"),
    ],
)
def test_bad_values_fail_before_a_model_is_read(run, args, says):
    mistake(run("generate", "text", "--target", "no such!", *args), says)


def test_bad_models_and_prompts(run, base, tmp_path):
    target = ("--target", base / "target")
    (tmp_path / "config.json").write_text("{")
    mistake(run("generate", "text", "--target", tmp_path / "no"), "is no folder")
    mistake(run("generate", "text", "--target", "no/such"), "there is no folder 'no/such'")
    mistake(run("generate", "text", "--target", tmp_path), "cannot be read as a model")
    mistake(run("generate", "text", *target, "--draft", tmp_path), "cannot be read as a model")
    mistake(run("generate", "text", *target, "--draft", base / "bare"), "output rows")
    mistake(run("generate", "text", *target, "--draft", base / "t5"), "for a causal target")
    mistake(run("generate", "text", *target, "--draft", "ngram:no"), "'reproduction.ngram:FILE'")
    mistake(run("generate", "text", *target, "--draft", "no.such:no"), "no module no.such")
    mistake(run("generate", "a" * 500, *target), "prompt 0 has 500 tokens, the model holds 96")
    mistake(run("generate", "", *target), "prompt 0 is empty")
    mistake(run("generate", "a", *target, "--device", "quantum"), "device 'quantum' cannot be used")
    mistake(run("generate", "text", *target, "--gamma", 96), "gamma + 1 must fit in the context")


def test_a_generation_config_that_changes_the_distribution(run, base, tmp_path):
    target = llama(64)
    target.generation_config.guidance_scale = 1.5
    args = ("generate", "1,2", "--target", folder(tmp_path / "m", target), "--max-new-tokens", 3)
    mistake(run(*args), "guidance_scale=1.5")
    assert "--ignore-generation-config" in run(*args).err
    assert run(*args, "--ignore-generation-config").code == 0


def test_invalid_logits_are_told_with_their_place(run, tmp_path):
    target = llama(64)
    target.lm_head.weight.data[5] = float("nan")
    args = ("--target", folder(tmp_path / "m", target), "--draft", "none")
    mistake(run("generate", "1,2,3", *args), "the target's logits hold NaN at position 3 of row 0")


def test_help_lists_what_there_is(run):
    result = run("--help")
    assert result.code == 0
    for command in ("generate", "certify", "doctor", "train"):
        assert command in result.out
    for option in ("--prompt-file", "--gamma", "--show-tokens", "--compare", "--json", "--min-p"):
        assert option in run("generate", "--help").out


def test_options_of_a_group_go_after_its_command(run):
    said = "No such option: --target; options go after the command: foretoken export vllm --target"
    mistake(run("export", "--target", "x", "vllm"), said)
    assert "foretoken generate --gamma" in run("--gamma", 2, "generate", "x").err


def test_an_unknown_option_is_a_usage_error(run):
    """And in one line, with names like it; so is a value that cannot be read."""
    mistake(run("generate", "text", "--nonsense"), "No such option: --nonsense")
    result = run("generate", "text", "--repetition-penalt", "2")
    mistake(result, "--repetition-penalt")
    assert result.err.endswith("foretoken generate --help lists all options\n")
    said = "Invalid value for '--top-k': it must be a whole number, not 'many'; foretoken generate"
    mistake(run("generate", "text", "--top-k", "many"), said)
    said = "Invalid value for '--seed': it must be a whole number, not '1.5'; foretoken generate"
    mistake(run("generate", "text", "--seed", "1.5"), said)
    said = "Invalid value for '--temperature': it must be a number, not 'hot'; foretoken generate"
    mistake(run("generate", "text", "--temperature", "hot"), said)
    mistake(run("nonsense"), "No such command 'nonsense'")


@pytest.mark.prove
def test_help_is_broken_by_the_terminal_alone(run, monkeypatch):
    """A line ends where the next word does not fit, at any width."""
    commands = ("generate bench certify doctor").split()
    trainers = [("train", name) for name in "distill eagle dspark".split()]
    for width in (80, 120):
        monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", width)
        for command in [*((name,) for name in commands), *trainers]:
            shown = run(*command, "--help").out
            prose = shown[shown.index("[OPTIONS]") :].split("\n", 1)[1].split("╭", 1)[0]
            for paragraph in re.split(r"\n\s*\n", prose.strip("\n")):
                lines = [line.strip() for line in paragraph.strip().splitlines()]
                for line, further in zip(lines, lines[1:], strict=False):
                    assert len(line) + 1 + len(further.split()[0]) > width - 3, (command, line)


def test_a_text_that_ends_with_the_context_says_so(run, base, tmp_path):
    """The context has 96 places."""
    model = folder(tmp_path / "m", llama(64, eos_token_id=None))
    args = ("--target", model, "--draft", "none", "--max-new-tokens")
    result = run("generate", "1,2,3", *args, 200)
    says = "1 of 1 texts end where the model's context does, before max_new_tokens: prompt 0\n"
    assert result.code == 0 and result.err == says and result.out.count(",") == 92
    assert run("generate", "1,2,3", *args, 93).err == ""
    assert run("generate", "1,2,3", *args, 200, "--json").err == ""
    (tmp_path / "p.txt").write_text("1,2,3\n" + ",".join("5" * 60) + "\n")
    many = run("generate", "--prompt-file", tmp_path / "p.txt", *args, 50)
    says = "1 of 2 texts end where the model's context does, before max_new_tokens: prompt 1\n"
    assert many.err == says


def test_several_texts_are_told_apart(run, base, tmp_path):
    """Also where they have lines of their own, and are shown token by token."""
    file = tmp_path / "prompts.jsonl"
    long = "It was the first day " * 5
    file.write_text(json.dumps({"prompt": long, "id": "a"}) + '\n{"prompt": [5, 6]}\n')
    args = ("--target", base / "target", "--draft", "none", "--max-new-tokens", 6)
    for extra in ((), ("--show-tokens",)):
        shown = run("generate", "--prompt-file", file, *args, *extra).out
        assert shown.startswith(f"==> prompt 0 (a): {long[:60]}... <==\n")
        assert "\n\n==> prompt 1: 5,6 <==\n" in shown
    assert "==>" not in run("generate", long, *args).out


@pytest.mark.prove
@pytest.mark.real_costs
def test_a_long_measurement_says_so(run, base, tmp_path, monkeypatch):
    """Once: the next command knows what steps cost, whatever the machine did meanwhile."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(slow_log, "AFTER", 0.0)
    args = ("generate", "It was", "--target", base / "target", "--draft", base / "draft")
    err = run(*args).err
    assert re.search(r"^measuring what steps cost.*: target, draft, greedy, 1 row$", err, re.M)
    assert "loading target\n" in err and "loading the draft draft\n" in err
    assert "measuring" not in run(*args).err


# Other processes


def python(*args: object, **options) -> subprocess.Popen[str]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "foretoken", *map(str, args)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **(pipes | options))


def heeds_ctrl_c() -> None:
    """A shell that runs the tests in the background has told them, and theirs, to ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_a_mistake_is_one_line_in_another_process(tmp_path):
    with python("bench", "--prompts", tmp_path / "no.txt") as run:
        out, err = run.communicate(timeout=120)
    mistake(Result(run.returncode, out, err), "no.txt cannot be read")


@pytest.mark.prove
def test_ctrl_c_keeps_what_was_generated(base, tmp_path):
    """A long text: interrupted once it is under way. Only a conversion is told besides."""
    target = folder(tmp_path / "long", llama(64, context=10**6, eos_token_id=None))
    args = ("--target", target, "--draft", "none", "--max-new-tokens", 900_000)
    with python("generate", "1,2,3", *args, preexec_fn=heeds_ctrl_c) as process:
        head = process.stdout.read(20)  # it is under way
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=60)
    assert process.returncode == 130
    tokens = [int(token) for token in (head + rest).strip().split(",") if token]
    expected = foretoken.load(target, "none").generate([1, 2, 3], max_new_tokens=5)[0].tokens
    assert tokens[:5] == expected
    assert re.fullmatch(r"((converted|measured|\w+ing) .*\n)*\ninterrupted after \d+ tokens\n", err)


def test_ctrl_c_in_a_batch_prints_every_completion(run, base, tmp_path, monkeypatch):
    file, calls = tmp_path / "prompts.txt", []
    file.write_text("It was\nThe day\n")
    foretoken.load(base / "target", "none")  # the self-check is over before calls are counted
    original = foretoken.models.stock.model.CausalModel.score

    def score(self, *args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(foretoken.models.stock.model.CausalModel, "score", score)
    args = ("--target", base / "target", "--draft", "none", "--max-new-tokens", 9, "--json")
    result = run("generate", "--prompt-file", file, *args)
    assert result.code == 130
    completions = json.loads(result.out)["completions"]
    assert [len(c["tokens"]) for c in completions] == [3, 3]
    assert {c["finish_reason"] for c in completions} == {"interrupted"}


def test_ctrl_c_between_two_texts_leaves_whole_json(run, base, tmp_path, monkeypatch):
    file = tmp_path / "prompts.txt"
    file.write_text("It was\nThe day\n")

    def completions(spec, rows, *_):
        yield from spec.generate(["It was"], max_new_tokens=2)
        raise KeyboardInterrupt

    args = ("--prompt-file", file, "--target", base / "target", "--draft", "none", "--json")
    monkeypatch.setattr("foretoken.cli.generate._all", lambda spec, *how: completions(spec, *how))
    result = run("generate", *args)
    assert result.code == 130 and len(json.loads(result.out)["completions"]) == 1


def test_ctrl_c_while_loading_is_quiet(run, monkeypatch):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("foretoken.loading.load.load_checked", interrupt)
    result = run("generate", "text")
    assert result.code == 130 and result.out == "" and "Traceback" not in result.err


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


def test_json_reports_the_gamma_that_makes_the_text_again(run, base):
    args = ("--target", base / "target", "--draft", base / "target", "--max-new-tokens", 9)
    document = json.loads(run("generate", "It was", *args, "--gamma", 3, "--json").out)
    assert document["completions"][0]["gamma"] == 3
