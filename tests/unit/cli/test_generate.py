"""`foretoken generate` with options and messages, end to end on small models; the rest of it is in
test_cli.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import foretoken
from console import Run, mistake
from foretoken.speculator import MAX_ROWS
from tiny import byte_level, folder, llama

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
USER = {"role": "user", "content": "Where?"}


@pytest.fixture
def run(console: Run) -> Run:
    return console


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `target`, `draft`, and `bare` without a tokenizer."""
    base = tmp_path_factory.mktemp("generate")
    folder(base / "target", llama(320, eos_token_id=None), byte_level())
    folder(base / "draft", llama(320, seed=1, num_hidden_layers=1), byte_level())
    folder(base / "bare", llama(64))
    (base / "chat.jinja").write_text(TEMPLATE)
    return base


@pytest.fixture
def pair(base: Path) -> tuple[object, ...]:
    return ("--target", base / "target", "--draft", base / "draft", "--gamma", 2)


@pytest.fixture(scope="module")
def spec(base: Path) -> foretoken.Speculator:
    return foretoken.load(base / "target", base / "draft")


def lines(path: Path, *rows: object) -> tuple[str, Path]:
    file = path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return "--prompt-file", file


def completions(result) -> list[dict]:
    assert result.code == 0, result.err
    return json.loads(result.out)["completions"]


def test_controls_shape_the_text_that_is_streamed(run, pair, spec):
    sampling = {"repetition_penalty": 1.8, "max_new_tokens": 20, "presence_penalty": 0.5}
    flags = [part for n, v in sampling.items() for part in (f"--{n.replace('_', '-')}", v)]
    expected = spec.generate("It was", gamma=2, **sampling)[0].text
    assert run("generate", "It was", *pair, *flags).out == expected + "\n"
    assert expected != spec.generate("It was", gamma=2, max_new_tokens=20)[0].text


def test_a_stop_string_ends_it_and_is_not_shown(run, pair, spec):
    whole = spec.generate("It was", max_new_tokens=20)[0].text
    stop = whole[6:9]
    flags = ("--stop", "no such text", "--stop", stop, "--max-new-tokens", 20)
    before = whole[: whole.index(stop)]
    assert run("generate", "It was", *pair, *flags).out == before + "\n"
    result = run("generate", "It was", *pair, *flags, "--include-stop-string")
    assert result.out == before + stop + "\n"
    (completion,) = completions(run("generate", "It was", *pair, *flags, "--json"))
    assert completion["stop_reason"] == stop and completion["finish_reason"] == "stop"
    assert completion["params"] == {"max_new_tokens": 20, "stop_strings": ["no such text", stop]}


def test_several_texts_of_a_prompt(run, pair, spec, tmp_path):
    sampling = {"num_return_sequences": 2, "temperature": 1.0, "max_new_tokens": 6}
    flags = ("--num-return-sequences", 2, "--temperature", 1, "--max-new-tokens", 6)
    file = lines(tmp_path, {"prompt": "It was"}, {"prompt": "The", "num_return_sequences": 1})
    texts = spec.generate("It was", gamma=2, seed=5, **sampling)
    shown = run("generate", *file, *pair, *flags, "--seed", 5).out
    assert shown.startswith(f"==> prompt 0, text 0: It was <==\n{texts[0].text}\n")
    assert f"\n==> prompt 0, text 1: It was <==\n{texts[1].text}\n\n==> prompt 1: The" in shown
    rows = completions(run("generate", *file, *pair, *flags, "--seed", 5, "--json"))
    assert [c["tokens"] for c in rows[:2]] == [c.tokens for c in texts]
    assert [(c["prompt"], c["seed"]) for c in rows] == [(0, [5, 0]), (0, [5, 1]), (1, [5, 2])]


def test_more_texts_than_share_a_pass(run, pair, spec):
    many = MAX_ROWS + 2
    sampling = {"num_return_sequences": many, "temperature": 1.0, "max_new_tokens": 2}
    flags = ("--num-return-sequences", many, "--temperature", 1, "--max-new-tokens", 2, "--json")
    rows = completions(run("generate", "It was", *pair, *flags))
    assert [c["tokens"] for c in rows] == [
        c.tokens for c in spec.generate("It was", gamma=2, **sampling)
    ]


def test_what_was_given_makes_the_text_again(run, pair, tmp_path):
    flags = ("--temperature", 0.8, "--logit-bias", '{"5": 2.5}', "--bad-words-ids", "[[7, 8]]")
    flags += ("--sequence-bias", "[[[9], -1.5]]", "--exponential-decay", "3,1.1")
    flags += ("--suppress-tokens", "1,2", "--stop-token-ids", "300", "--max-new-tokens", 12)
    (first,) = completions(run("generate", "It was", *pair, *flags, "--json"))
    file = lines(tmp_path, {"prompt": "It was", **first["params"]})
    (again,) = completions(run("generate", *file, *pair, "--json"))
    assert again["tokens"] == first["tokens"] and again["params"] == first["params"]


def test_a_line_has_options_of_its_own(run, pair, spec, tmp_path):
    file = lines(tmp_path, {"prompt": "It was"}, {"prompt": "It was", "max_new_tokens": 3})
    long, short = completions(run("generate", *file, *pair, "--max-new-tokens", 9, "--json"))
    tokens = spec.generate("It was", gamma=2, max_new_tokens=9)[0].tokens
    assert long["tokens"] == tokens and short["tokens"] == tokens[:3]


def test_logprobs_are_in_json(run, pair, spec):
    flags = (*pair, "--max-new-tokens", 3, "--logprobs", 1, "--prompt-logprobs", 0)
    mistake(run("generate", "It was", *flags), "printed as JSON only")
    (completion,) = spec.generate(
        "It was", gamma=2, max_new_tokens=3, logprobs=1, prompt_logprobs=0
    )
    (row,) = completions(run("generate", "It was", *flags, "--json"))
    for name in ("logprobs", "prompt_logprobs"):
        known = getattr(completion, name)
        assert [each["token"] for each in row[name]] == [each.token for each in known]
        logprobs = [each["logprob"] for each in row[name]]
        assert logprobs == pytest.approx([each.logprob for each in known], abs=1e-3)


def test_chat(run, pair, base, spec):
    template = ("--chat-template", base / "chat.jinja", "--max-new-tokens", 6)
    expected = spec.generate("user: Where?\nassistant:", gamma=2, max_new_tokens=6)[0]
    shown = run("generate", "Where?", "--chat", *pair, *template)
    assert shown.out == expected.text + "\n"
    briefly = spec.generate([{"role": "system", "content": "Be brief."}, USER], gamma=2,
                            chat_template=TEMPLATE, max_new_tokens=6)[0]  # fmt: skip
    flags = ("--chat", "--system", "Be brief.", *template, "--json")
    (completion,) = completions(run("generate", "Where?", *pair, *flags))
    assert completion["tokens"] == briefly.tokens


def test_lines_of_messages(run, pair, base, spec, tmp_path):
    file = lines(tmp_path, {"messages": [USER], "id": "m"}, {"prompt": "Where?"})
    flags = ("--chat-template", base / "chat.jinja", "--max-new-tokens", 4)
    reply = spec.generate([USER], gamma=2, chat_template=TEMPLATE, max_new_tokens=4)[0].text
    plain = spec.generate("Where?", gamma=2, max_new_tokens=4)[0].text
    shown = run("generate", *file, *pair, *flags).out
    assert shown == f"==> prompt 0 (m): Where? <==\n{reply}\n\n==> prompt 1: Where? <==\n{plain}\n"
    wrapped = run("generate", *file, *pair, *flags, "--chat").out
    assert wrapped.count(reply) == 2
    steps = run("generate", *file, *pair, *flags, "--show-tokens").out
    assert "==> prompt 0 (m): Where? <==\nWhere?\n" in steps


def test_messages_that_cannot_be_rendered(run, pair, base, tmp_path):
    says = "the tokenizer has no chat template; give chat_template="
    mistake(run("generate", "Where?", "--chat", *pair), says)
    file = lines(tmp_path, {"prompt": "a"}, {"messages": [USER]})
    mistake(run("generate", *file, *pair), f"line 2: {says}")
    mistake(
        run("generate", "1,2", "--chat", "--target", base / "bare"), "messages need a tokenizer"
    )


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


def test_all_rows_may_fail(run, pair, tmp_path):
    every = ",".join(map(str, range(320)))
    file = lines(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    flags = (*pair, "--suppress-tokens", every)
    both = run("generate", *file, *flags)
    assert both.code == 1 and both.err.count("error: prompt ") == 2
    streamed = run("generate", "a", *flags)
    assert streamed.code == 1 and streamed.out == ""
    assert streamed.err.startswith("error: row 0: ") and streamed.err.count("\n") == 1
    document = run("generate", "a", *flags, "--json")
    assert document.code == 1 and json.loads(document.out)["completions"][0]["tokens"] == []


def test_compare_with_options(run, pair):
    flags = ("--compare", "--min-new-tokens", 6, "--max-new-tokens", 6, "--repetition-penalty", 1.5)
    assert "Theorem 3.8" in run("generate", "It was", *pair, *flags).out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ["--min-new-tokens", 9, "--max-new-tokens", 3],
            "min_new_tokens=9 is above max_new_tokens",
        ),
        (["--num-return-sequences", 2], "num_return_sequences=2 at temperature 0"),
        (["--include-stop-string"], "include_stop_string has nothing to include"),
        (["--stop", ""], "stop_strings holds ''"),
        (["--bad-words-ids", "5"], "bad_words_ids is 5; give a list of lists of ids"),
        (["--regex", "a", "--choice", "b"], "cannot follow --regex and --choice at once"),
        (["--json-schema", "no-such-file"], "no-such-file cannot be read"),
        (["--system", "a"], "--system is for messages, and there are none; add --chat"),
        (["--chat", "--chat-template", "no-such-file"], "no-such-file cannot be read"),
        (
            ["--compare", "--num-return-sequences", 2, "--temperature", 1],
            "--compare takes one prompt and one text of it, not 2",
        ),
    ],
)
def test_mistakes_are_told_before_a_model_is_read(run, flags, says):
    mistake(run("generate", "text", "--target", "no such!", *flags), says)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"temprature": 1}, "line 2: temprature is unknown here; did you mean temperature?"),
        ({"top_p": 2}, "line 2: top_p is 2.0; give a number in (0, 1]"),
        ({"min_new_tokens": 80}, "line 2: min_new_tokens=80 is above max_new_tokens=64"),
    ],
)
def test_mistakes_in_a_line_too(run, tmp_path, row, says):
    file = lines(tmp_path, {"prompt": "a"}, {"prompt": "b", **row})
    mistake(run("generate", *file, "--target", "no such!"), says)


def test_what_only_the_model_knows_is_told_before_it_runs(run, pair, tmp_path, monkeypatch):
    monkeypatch.setattr(
        foretoken.Speculator, "completions", lambda *args: pytest.fail("it has run")
    )
    mistake(
        run("generate", "a", *pair, "--logit-bias", '{"320": 1}'), "logit_bias names the id 320"
    )
    mistake(
        run("generate", "a", *pair, "--json", "--logprobs", 321),
        "logprobs is 321, but there are 320",
    )
    file = lines(tmp_path, {"prompt": "a"}, {"prompt": "b", "suppress_tokens": [999]})
    mistake(
        run("generate", *file, *pair), "prompts.jsonl, line 2: suppress_tokens names the id 999"
    )


def test_measuring_commands_refuse_options(run, pair, tmp_path):
    _, file = lines(tmp_path, {"prompt": "a"}, {"prompt": "b", "temperature": 1})
    for command in ("bench", "certify"):
        flags = () if command == "certify" else ("--gamma", 2)
        result = run(command, "--prompts", file, *pair[:4], *flags)
        mistake(result, "line 2: temperature is unknown here")


def test_a_target_by_its_place_or_by_name(run: Run, base: Path) -> None:
    rest = ("--draft", "none", "--max-new-tokens", 8)
    named = run("generate", "--target", base / "target", "Once", *rest)
    placed = run("generate", base / "target", "Once", *rest)
    assert named.code == 0 and named.out and named.out == placed.out
    both = run("generate", base / "target", "--target", base / "bare", "Once", *rest)
    mistake(both, f"the target is '{base / 'target'}' and --target '{base / 'bare'}'; give one")
    mistake(run("generate", "Once", "upon", "a", *rest), "3 texts are given")
