"""Mistakes in a command: one line each that names the value and the remedy, before weights load."""

from __future__ import annotations

import logging
import shlex
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

import foretoken
from console import Run, mistake
from foretoken.loading import load as loading
from foretoken.server.process.startup import describe_missing
from tiny import byte_level, folder, llama

ELSEWHERE = "generate hi --target nowhere/at/all"  # whose own mistake would be told later
SERVER = "chat -q x --url http://127.0.0.1:9"
DISTILL = "train distill --target target --data text --out out --shape num_hidden_layers=1"
BENCH = "bench bare --prompts ids.txt"
CERTIFY = "certify --target target --draft draft"
VLLM = "export vllm --target a/t --draft b/d"

MISTAKES = [
    # a value of an option, by each kind of check
    (f"{ELSEWHERE} --temperature nan", "temperature is nan; give"),
    (f"{ELSEWHERE} --top-p 1.5", "top_p is 1.5; give a number in (0, 1]"),
    (f"{ELSEWHERE} --bad-words-ids 5", "bad_words_ids is 5; give a list of lists of ids"),
    (f"{ELSEWHERE} --bad-words-ids '[[5'", "bad_words_ids is '[[5', which is"),
    (ELSEWHERE + """ --logit-bias '{"5": NaN}'""", "logit_bias is '{\"5\": NaN}', which is"),
    (f"{ELSEWHERE} --suppress-tokens 1,x", "suppress_tokens is '1,x'; give numbers separated by"),
    (f"{ELSEWHERE} --exponential-decay 5", "exponential_decay_length_penalty is [5]; "),
    (f"{ELSEWHERE} --regex ' '", "structured's regex is ' '; give a non-empty string"),
    (f"{ELSEWHERE} --json-schema nowhere", "nowhere cannot be read"),
    (f"{ELSEWHERE} --chat --chat-template nowhere", "nowhere cannot be read"),
    (f"{ELSEWHERE} --top-k many", "'--top-k': it must be a whole number, not 'many'"),
    (f"{ELSEWHERE} --temperature hot", "'--temperature': it must be a number, not 'hot'"),
    # options that do not go together
    (f"{ELSEWHERE} --num-return-sequences 2", "num_return_sequences=2 at temperature 0"),
    (f"{ELSEWHERE} --include-stop-string", "include_stop_string has no effect"),
    (f"{ELSEWHERE} --regex a --choice b", "cannot follow --regex and --choice at once"),
    (f"{ELSEWHERE} --system a", "--system needs messages, and there are none; add --chat"),
    (
        f"{ELSEWHERE} --compare --num-return-sequences 2 --temperature 1",
        "one prompt with one output, not 2",
    ),
    (f"{ELSEWHERE} --logprobs 1", "printed as JSON only"),
    (f"{ELSEWHERE} --output x", "--output needs a file of prompts"),
    (f"{ELSEWHERE} --prompt-file prompts.txt", "not both"),
    ("generate --prompt-file prompts.txt --output x --json", "--output needs a file of"),
    ("generate --prompt-file prompts.txt --compare", "--compare takes one prompt"),
    ("generate hi --replicas 2", "--ray and --replicas need files"),
    ("generate hi --threads 2", "--threads needs --replicas; add --replicas"),
    # words
    ("nonsense", "No such command 'nonsense'"),
    ("generate hi --nonsense", "No such option: --nonsense"),
    ("--gamma 2 generate x", "foretoken generate --gamma"),
    ("export --target x vllm", "options go after the command: foretoken export vllm --target"),
    ("generate target --target bare Once", "bare'; give one"),
    ("generate Once upon a", "3 arguments are given"),
    # prompts and files
    ("generate --target target", "no prompt"),
    ("generate --prompt-file no.txt", "no.txt cannot be read"),
    ("generate --prompt-file text", "cannot be read"),
    ("generate --prompt-file empty.txt", "has no prompts"),
    ("bench --prompts wish.jsonl", "line 1: temperature is unknown here"),
    ("certify --prompts wish.jsonl", "line 1: temperature is unknown here"),
    # models
    ("generate hi --target ./no", "is not a folder"),
    ("generate hi --target broken", "cannot be read as a model"),
    # what is no model, or lacks what a prompt needs
    ("generate bare 'It was'", "has no tokenizer"),
    ("generate --target bare --prompt-file prompts.txt", "has no tokenizer"),
    ("bench --target bare --prompts prompts.txt", "has no tokenizer"),
    ("chat bare -q Hi", "has no tokenizer"),
    ("generate --target target --chat Hi", "--chat-template FILE"),
    ("generate --target target --prompt-file chat.jsonl", "--chat-template FILE"),
    ("generate hi --target empty", "empty is an empty folder; give a folder with config.json"),
    ("generate hi --target text", "text holds no config.json; give a folder with config.json"),
    (
        "generate hi --target weightless",
        "weightless holds no weights; give a folder with",
    ),
    ("generate hi --target ids.txt", "ids.txt is not a model file; give a model's"),
    ("generate hi --target model", "model is a GGUF file without the suffix .gguf; rename it to"),
    ("generate hi --target target/config.json", "is one file of a model; give the model's folder"),
    # chat, of models here and of servers
    ("chat -q x --api-key k", "--api-key needs a server; add --url"),
    ("chat -q x", "has no chat template"),  # the pair that ships
    ("chat -q x target", "give --chat-template FILE, or continue plain text"),
    ("chat -q ' ' target --chat-template chat.jinja", "--quick is empty"),
    ("chat -q x target --chat-template no", "there is no such file"),
    (f"{SERVER} --lenience 2", "lenience is 2.0"),
    (f"{SERVER} --target t", "--target does not work with --url; leave out one"),
    (f"{SERVER} --dtype int8", "--dtype does not work with --url"),
    (f"{SERVER} --trust-remote-code", "--trust-remote-code does not work with --url"),
    ("chat --raw -q x --system-prompt S", "--system-prompt has an effect only on chat messages"),
    ("chat --raw -q x --chat-template f", "--chat-template has an effect only on chat messages"),
    ("chat --raw -q x --min-new-tokens 99", "is above max_new_tokens=64"),
    # bench
    (f"{BENCH} --max-new-tokens 3 --gamma 2", "too few to time gamma 2; give 4 or more"),
    (f"{BENCH} --draft lookup --draft lookup", "names a draft twice"),
    (f"{BENCH} --batch 1,x", "batch is '1,x'; give numbers separated by commas"),
    (f"{BENCH} --batch 8,17", "batch is [8, 17]; give numbers from 1 to 16"),
    (f"{BENCH} --limit 0", "limit is 0; give the number of prompts to use, 1 or more"),
    ("bench bare --limit 1", "--limit needs a file of prompts; add --prompts"),
    (f"{BENCH} --chat-template chat.jinja", "needs messages, and there are none; give messages"),
    (f"{BENCH} --target elsewhere", "--target is 'elsewhere'; give one of them"),
    # certify
    (f"{CERTIFY} --gamma 0", "gamma is 0; give 1 or more to certify a draft"),
    (f"{CERTIFY} --limit 0 --prompts no.txt", "limit is 0"),
    (f"{CERTIFY} --prompts no.txt", "no.txt cannot be read"),
    (f"{CERTIFY} --top-k 5", "temperature is 0: top-k, top-p and min-p do not change"),
    ("certify --target bare", "no tokenizer; give --prompts, a file"),
    # train
    (f"{DISTILL} --loss mse", "loss is 'mse'; give one of kl, rkl, jsd, tv, nla, lk"),
    (f"{DISTILL} --on-policy 2", "on_policy is 2.0; give a share in [0, 1]"),
    (f"{DISTILL} --steps 0", "steps is 0; give 1 or more"),
    (f"{DISTILL} --shape hidden_size", "shape has 'hidden_size'; give name=value"),
    (f"{DISTILL} --shape width=3", "width is not a size of a llama model"),
    # export
    ("export vllm --target a/t --gamma 4", "this target needs --draft"),
    (VLLM, "give --gamma, for example"),
    ("export vllm --target t5 --draft b/d --gamma 1", "an encoder-decoder"),
    ("export vllm --target a/t --draft none --gamma 3", "gamma is 3 with --draft"),
    (f"{VLLM} --gamma 0", "gamma is 0 with --draft b/d; give --gamma 1 or more"),
    (f"{VLLM} --gamma 4 --temperature nan", "temperature is nan"),
    (f"{VLLM} --gamma 4 --draft ''", "draft is empty; give a folder or hub id, or leave out"),
    (f"{VLLM} --gamma 4 --draft assistant", "kind assistant, which vLLM does not have"),
    (f"{VLLM} --gamma 4 --draft self:0-3", "draft self:0-3 exists in foretoken only; give"),
    (f"{VLLM} --gamma 4 --draft a.module:file", "draft a.module:file exists in foretoken only"),
    (
        f"export vllm m.json{VLLM[11:]} --gamma 4",
        "give either a file of foretoken bench or --target",
    ),
    ("export vllm m.json", "m.json cannot be read: there is no such file; give a file with"),
    ("export vllm assistant/config.json", "is not a benchmark; make one with foretoken"),
    # serve
    ("serve --port 70000", "--port is 70000"),
    ("serve --metrics-compat sglang", "give vllm"),
    ("serve --log-format xml", "text, json"),
    ("serve --max-rows 0", "--max-rows is 0"),
    ("serve --drain nan", "--drain is nan"),
    ("serve --api-key ''", "--api-key is empty"),
    ("serve --host nowhere.invalid", "cannot listen on nowhere.invalid:8000"),
    ("serve nowhere/at/all", "nowhere"),
    ("serve here --target there", "TARGET is 'here', but --target is 'there'; give one"),
    ("serve --gamma -1", "gamma is -1"),
    ("serve --draft none --speculative-config {}", "sets --draft, --gamma and --rule"),
    ("serve --speculative-config no.json", "no.json cannot be read: there is no such file"),
    ("serve --chat-template nowhere.jinja", "nowhere.jinja"),
    ("serve --replicas 0", "--replicas is 0; give a whole"),
    ("serve --replicas 2 --threads 0", "--threads is 0; give a whole"),
    ("serve --threads 2", "--threads needs --replicas; add --replicas"),
    ("serve --ray ''", "--ray is empty; give host:port, auto or local"),
    ("serve --port 0 --ray 127.0.0.1:9", "Ray does not answer at 127.0.0.1:9"),
    # serve's adapters
    ("serve --adapter fast=", "--adapter is 'fast='; give NAME=FOLDER, or a folder"),
    ("serve --adapter =x", "--adapter is '=x'; give NAME=FOLDER, or a folder"),
    ("serve --adapter a=x --adapter a=y", "--adapter gives the name 'a' twice"),
    ("serve --adapter x --adapter y", "--adapter gives two adapters without names"),
    ("serve --adapter x --adapter a=y", "x has no name, and there are other adapters"),
    ("serve --adapter novels=lora", "novels=lora has the target's name; rename the adapter"),
    ("serve --adapter a=.", "contains no adapter: adapter_config.json: "),
    ("serve --adapter a=lora --adapter b=no/at/all", "adapter is 'no/at/all'; give a"),
    ("serve --adapter a=lora --replicas 2", "serve one model only; start a server"),
    # doctor
    ("doctor --dtype int8", "name the model: foretoken doctor MODEL"),
    ("doctor target --dtype int5", "int5"),
]


# What is found out only once the models are loaded
LATER = [
    ("generate '' --target target", "prompt 0 is empty"),
    ("generate a\udcffb --target target", "prompt 0 is not valid text"),
    ("generate 1,64 --target bare", "prompt 0 holds the id 64"),
    ("generate one,2 --target bare --draft none", "'one,2' is not ids separated by commas"),
    ("generate hi --target target --draft broken", "cannot be read as a model"),
    ("generate hi --target target --draft bare", "output rows"),
    ("generate hi --target target --draft t5", "for a decoder-only target"),
    ("generate hi --target target --draft no.such:no", "no module no.such"),
    ("generate hi --target target --device quantum", "device 'quantum' cannot be used"),
    ("generate hi --target target --gamma 96", "gamma + 1 must fit in the context"),
    ("generate a --target target --logit-bias '{\"320\": 1}'", "logit_bias names the id 320"),
    ("generate a --target target --json --logprobs 321", "logprobs is 321, but the model has 320"),
    ("generate hi --target refused", "guidance_scale=1.5"),
    ("generate 1,2,3 --target nan", "the target's logits hold NaN at position 3 of row 0"),
    (f"{CERTIFY} --draft none", "draft is none, which is plain decoding; give a draft"),
    (f"{BENCH} --max-new-tokens 5000", "prompt 0 leaves room for 93 new tokens, not 5000"),
    (f"{DISTILL} --data no", "there is no no; give a file of documents or of sources"),
    (f"{DISTILL} --target bare", "the target has no tokenizer"),
    (f"{DISTILL} --out text/book.txt/run", "text/book.txt/run"),
]


@pytest.fixture(scope="module")
def folders(base: Path) -> Path:
    """Besides the models, what is none: folders and files that a command must refuse."""
    for name, content in {
        "ids.txt": "5,17,33\n3,58,20,36\n",
        "empty.txt": "\n \n",
        "wish.jsonl": '{"prompt": "a", "temperature": 1}\n',
        "chat.jsonl": '{"messages": [{"role": "user", "content": "Hi"}]}',
        "model": "GGUF....",
        "broken/config.json": "{",
        "assistant/config.json": '{"model_type": "gemma4_assistant"}',
        "lora/adapter_config.json": '{"peft_type": "LORA"}',
        "lora/adapter_model.safetensors": "",
    }.items():
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text(content)
    refused, invalid = llama(320), llama(64)
    refused.generation_config.guidance_scale = 1.5
    invalid.lm_head.weight.data[5] = float("nan")
    folder(base / "refused", refused, byte_level())
    folder(base / "nan", invalid)
    folder(base / "weightless", llama(320), byte_level())
    (base / "weightless" / "model.safetensors").unlink()
    (base / "empty").mkdir()
    return base


@pytest.mark.parametrize(("command", "says"), [*MISTAKES, *LATER])
def test_a_mistake_is_one_line(
    run: Run, folders: Path, monkeypatch: pytest.MonkeyPatch, command: str, says: str
) -> None:
    def place(*args: object) -> None:
        raise AssertionError("weights are loaded")

    if (command, says) in MISTAKES:
        for name in ("place", "resolve_draft"):
            monkeypatch.setattr(loading, name, place)
    monkeypatch.chdir(folders)
    mistake(run(*shlex.split(command)), says)
    assert not Path("out").exists()


def test_a_port_that_is_taken(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        told = f"cannot listen on 127.0.0.1:{port} (Address already in use); give another"
        mistake(run("serve", "--port", port), told)


def test_load_and_the_server_warn_of_what_is_missing(
    base: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "place", None)
    with caplog.at_level(logging.WARNING, "foretoken"):
        for name in ("bare", "target"):
            with pytest.raises(TypeError):
                foretoken.load(base / name, "lookup")
    (told,) = caplog.messages
    assert told.startswith(
        "bare has no tokenizer, so prompts must be token ids; for string prompts"
    )
    bare, plain = (SimpleNamespace(name="m", tokenizer=each) for each in (None, byte_level()))
    assert "--tokenizer" in describe_missing(bare)
    assert "m has no chat template" in describe_missing(plain)
