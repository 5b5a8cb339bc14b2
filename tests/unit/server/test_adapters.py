"""A base and its adapters behind one address: every request chooses by its `model`, and each text
is that of `generate` of the model that peft merges."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any
from unittest import mock

import httpx2
import openai
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engines import loaded
from foretoken.loading.load import require_adapters
from foretoken.server.options import ServerOptions
from foretoken.server.process.client import Child, EngineClient, run_engine_process
from foretoken.server.process.messages import EngineSetup, LoadFailed
from served import LOADING, pair, serving_all, until

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft's own
HELLO: Any = [{"role": "user", "content": "Hello"}]
NAMES = ("tiny", "fast", "tidy")


def adapted(base: str, folder: Path, seed: int) -> str:
    """The folder of a random adapter of a base."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    network = AutoModelForCausalLM.from_pretrained(base)
    peft.get_peft_model(network, config).save_pretrained(str(folder))
    return str(folder)


def begin(setup: EngineSetup) -> Child:
    """An engine in a thread, which begins as one in a process does."""
    require_adapters(setup.target, setup.adapters, **setup.loading)
    return loaded(setup)


@pytest.fixture(scope="module")
def setups(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineSetup]:
    folder = tmp_path_factory.mktemp("adapters")
    target, draft = pair(folder)
    base = EngineSetup(target, draft, LOADING | {"adapter": None}, {"max_rows": 4})
    places = {name: adapted(target, folder / name, i) for i, name in enumerate(NAMES[1:], 1)}
    with_each = {
        name: replace(base, loading=LOADING | {"adapter": place}) for name, place in places.items()
    }
    return {"tiny": replace(base, adapters=(*places.values(),)), **with_each}


@pytest.fixture(scope="module")
def server(setups: dict[str, EngineSetup]) -> Iterator[tuple[str, dict[str, EngineClient]]]:
    with serving_all(setups, ServerOptions("tiny", drain=1.0), begin) as running:
        yield running


@pytest.fixture
def url(server: tuple[str, dict[str, EngineClient]]) -> str:
    return server[0]


@pytest.fixture(scope="module")
def merged(setups: dict[str, EngineSetup]) -> dict[str, Any]:
    """What transformers and peft make of each name, in float64."""
    target: Any = setups["tiny"].target
    networks = {name: AutoModelForCausalLM.from_pretrained(target) for name in NAMES}
    for name in NAMES[1:]:
        place = setups[name].loading["adapter"]
        wrapped: Any = peft.PeftModel.from_pretrained(networks[name].double(), place)
        networks[name] = wrapped.merge_and_unload(safe_merge=True)
    return {name: network.double().eval() for name, network in networks.items()}


def expected(network: Any, ids: list[int], count: int = 24) -> list[int]:
    text = network.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)
    return text[0, len(ids) :].tolist()


def post(url: str, path: str, **body: Any) -> Any:
    return httpx2.post(f"{url}{path}", json=body, timeout=60)


def test_each_name_gives_the_text_of_its_merged_model(url: str, merged: Any, setups: Any) -> None:
    """Whole and streamed, in chats, completions and responses; without a name, the base's."""
    tokenizer: Any = AutoTokenizer.from_pretrained(setups["tiny"].target)
    chat = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"]
    texts: dict[str, str] = {}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for name in NAMES:
            texts[name], answer = (
                tokenizer.decode(expected(merged[name], ids), skip_special_tokens=True)
                for ids in (tokenizer("It was").input_ids, chat)
            )
            greedy: Any = {"model": name, "temperature": 0}
            asked = greedy | {"prompt": "It was", "max_tokens": 24}
            told = client.completions.create(**asked)
            assert told.choices[0].text == texts[name] and told.model == name
            chunks = [*client.completions.create(**asked, stream=True)]
            assert "".join(chunk.choices[0].text for chunk in chunks) == texts[name]
            assert {chunk.model for chunk in chunks} == {name}
            done = client.chat.completions.create(messages=HELLO, max_tokens=24, **greedy)
            assert done.choices[0].message.content == answer and done.model == name
            responded = client.responses.create(input="Hello", max_output_tokens=24, **greedy)
            assert responded.output_text == answer and responded.model == name
    assert len(set(texts.values())) == 3  # a server that always took one engine would fail
    bare = post(url, "/v1/completions", prompt="It was", max_tokens=24, temperature=0).json()
    assert bare["choices"][0]["text"] == texts["tiny"] and bare["model"] == "tiny"
    ids = post(url, "/tokenize", model="tidy", prompt="It was").json()["tokens"]
    assert post(url, "/detokenize", model="fast", tokens=ids).json()["prompt"] == "It was"


def test_models_are_listed_by_name_and_others_are_not_found(url: str) -> None:
    listed = httpx2.get(f"{url}/v1/models").json()["data"]
    parents = {"tiny": None, "fast": "tiny", "tidy": "tiny"}
    assert {each["id"]: each["parent"] for each in listed} == parents
    assert {each["max_model_len"] for each in listed} == {1024}
    assert httpx2.get(f"{url}/v1/models/fast").json() == listed[1]
    for path, form in (
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
    ):
        answer = post(url, path, model="slow", **form)
        error = answer.json()["error"]
        assert answer.status_code == 404 and error["code"] == "model_not_found", answer.text
        assert (
            "give one of 'tiny', 'fast', 'tidy'" in error["message"] and error["param"] == "model"
        )
    for path in ("/v1/models/slow", "/v1/speculation?model=slow"):
        assert httpx2.get(f"{url}{path}").status_code == 404


def test_rates_and_metrics_are_by_name(url: str) -> None:
    def tokens(name: str) -> tuple[float, float]:
        lines = httpx2.get(f"{url}/metrics").text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        assert float(values[f'foretoken_engines_ready{{model_name="{name}"}}']) == 1
        counted = values.get(f'foretoken_generation_tokens_total{{model_name="{name}"}}', "0")
        told = httpx2.get(f"{url}/v1/speculation", params={"model": name}).json()
        assert told["model"] == name
        return told["tokens"], float(counted)

    before = {name: tokens(name) for name in NAMES}
    asked = {"prompt": "It was", "max_tokens": 9, "ignore_eos": True}
    assert post(url, "/v1/completions", model="fast", **asked).status_code == 200
    after = {name: tokens(name) for name in NAMES}
    assert after["fast"] == tuple(value + 9 for value in before["fast"])
    assert all(after[name] == before[name] for name in ("tiny", "tidy"))
    target = httpx2.get(f"{url}/v1/speculation", params={"model": "fast"}).json()["target"]
    assert target == "target with fast"
    assert httpx2.get(f"{url}/v1/speculation").json()["target"] == "target"


def test_a_model_that_cannot_be_loaded_ends_the_server_before_others_load(
    setups: dict[str, EngineSetup],
) -> None:
    begun: list[str | None] = []

    def refusing(setup: EngineSetup) -> Child:
        begun.append(adapter := setup.loading["adapter"])
        if adapter is None:
            return begin(setup)
        own, theirs = Pipe()
        theirs.send(LoadFailed("it does not fit"))
        return Child(mock.Mock(), own)

    with pytest.raises(AssertionError, match="it does not fit"):
        with serving_all(setups, ServerOptions("tiny", drain=1.0), refusing):
            pass
    assert begun == [None, setups["fast"].loading["adapter"]]


def test_the_base_engine_checks_all_adapters_before_it_loads(
    setups: dict[str, EngineSetup], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the process's life is over before its weights are looked for: these have none."""
    monkeypatch.setattr("foretoken.server.process.client.signal.signal", lambda *_: None)
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
    for name in names:
        shutil.copy(Path(str(setups["tiny"].target)) / name, tmp_path)
    fast = setups["fast"].loading["adapter"]
    (tmp_path / "other").mkdir()
    for file in Path(fast).iterdir():
        shutil.copy(file, tmp_path / "other")
    config = tmp_path / "other" / "adapter_config.json"
    config.write_text(config.read_text().replace('"q_proj"', '"another"'))
    said: dict[str, str] = {}
    for adapter in (fast, str(tmp_path / "other")):
        own, theirs = Pipe()
        base = replace(
            setups["tiny"], target=str(tmp_path), adapters=(adapter,), log_options=mock.Mock()
        )
        run_engine_process(theirs, base)
        said[adapter] = own.recv().message
    assert "no weights" in said.pop(fast)
    (message,) = said.values()
    assert "other does not fit LlamaForCausalLM: it has the unknown weight" in message


def test_the_engine_of_one_name_dies_alone(
    server: Any, setups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others answer; /health names what is away until it is there again. The base starts
    again whatever became of its adapters."""
    url, links = server
    monkeypatch.setattr("foretoken.server.process.client.RESTART_DELAYS_S", (3600.0,))

    def die(name: str) -> None:
        links[name]._process.kill()
        until(lambda: links[name].state == "restarting")

    def start_again(name: str) -> None:
        links[name]._loop.call_soon_threadsafe(links[name]._restart)
        until(lambda: httpx2.get(f"{url}/ready").status_code == 200)

    die("fast")
    asked = {"prompt": "a", "max_tokens": 3}
    answers = [post(url, "/v1/completions", model=name, **asked) for name in NAMES]
    assert [each.status_code for each in answers] == [200, 503, 200]
    health = httpx2.get(f"{url}/health")
    assert health.status_code == httpx2.get(f"{url}/ready").status_code == 503
    assert health.json()["engines"] == {"ready": 2, "restarting": 1}
    assert health.json()["models"] == {"tiny": "ready", "fast": "restarting", "tidy": "ready"}
    start_again("fast")
    assert post(url, "/v1/completions", model="fast", **asked).status_code == 200
    assert httpx2.get(f"{url}/health").status_code == 200
    config = Path(setups["fast"].loading["adapter"]) / "adapter_config.json"
    gone = config.rename(config.with_suffix(".gone"))
    try:
        die("tiny")
        start_again("tiny")
    finally:
        gone.rename(config)
    assert post(url, "/v1/completions", **asked).status_code == 200
