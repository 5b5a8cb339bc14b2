"""Pictures, sounds and speech, as clients send them to the server; and all that they may not."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import soundfile
from PIL import Image

import foretoken
from foretoken.media.spoken import as_srt, as_vtt
from foretoken.server import media
from foretoken.server.media import is_public
from foretoken.server.options import ServerOptions
from foretoken.speech.transcription import transcribe
from pictured import llava_folder
from served import LOADING, serving
from speech import whisper

GREEDY: dict[str, Any] = {"max_tokens": 10, "temperature": 0, "seed": 1}
RED, BLUE = (Image.new("RGB", (40, 30), color) for color in ("red", "blue"))


def file(image: Image.Image, kind: str = "PNG") -> bytes:
    image.save(held := io.BytesIO(), kind)
    return held.getvalue()


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def asking(*pictures: str, text: str = "What is it?") -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": each}} for each in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


LOCATIONS = {
    "/away": "http://elsewhere.test/a.png",
    "/port": "http://pictures.test:99999/red.png",
    "/zero": "http://pictures.test:0/red.png",
    "/bracket": "http://[::1",
    "/empty": "",
}


class Web(BaseHTTPRequestHandler):
    """A host with a picture, redirects, some of them nowhere, and a file that never ends."""

    def do_GET(self) -> None:
        if self.path[1:].isdigit() or self.path in LOCATIONS:
            self.send_response(int(self.path[1:]) if self.path[1:].isdigit() else 302)
            if self.path in LOCATIONS:
                self.send_header("Location", LOCATIONS[self.path])
            self.end_headers()
            return
        body = file(RED) if self.path == "/red.png" else b"0" * 3_000_000
        self.send_response(404 if self.path == "/none" else 200)
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:  # the reader has had enough
            pass

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Web)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://pictures.test:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llava_folder(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def pictured(folder: Path) -> Iterator[str]:
    options = ServerOptions(
        "tiny",
        drain=1.0,
        max_media=1_000_000,
        max_pixels=10_000,
        allowed_media_host=("pictures.test",),
    )
    with serving(str(folder), "lookup", options) as (address, _):
        yield address


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    """The texts that `generate` gives."""
    spec = foretoken.load(folder, "lookup", **LOADING)
    texts: dict[str, str] = {}
    for name, pictures in {"red": [RED], "blue": [BLUE], "both": [RED, BLUE]}.items():
        parts = [{"type": "image", "image": each} for each in pictures]
        parts.append({"type": "text", "text": "What is it?"})
        messages = [{"role": "user", "content": parts}]
        texts[name] = spec.generate(messages, max_new_tokens=10, gamma=2)[0].text or ""
    return texts


def post(address: str, body: Any, path: str = "chat/completions") -> httpx2.Response:
    return httpx2.post(f"{address}/v1/{path}", json=body, timeout=60)


def content(response: httpx2.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def test_chats_with_pictures_are_those_of_generate(pictured: str, expected: dict[str, str]) -> None:
    assert expected["red"] != expected["blue"]
    client = openai.OpenAI(base_url=f"{pictured}/v1", api_key="none", max_retries=0)
    ask: Any = partial(client.chat.completions.create, model="tiny", **GREEDY)
    assert ask(messages=asking(url(file(RED)))).choices[0].message.content == expected["red"]
    both = asking(url(file(RED)), url(file(BLUE, "BMP")))
    assert ask(messages=both).choices[0].message.content == expected["both"]
    stream = ask(messages=asking(url(file(BLUE))), stream=True)
    assert (
        "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == expected["blue"]
    )
    several = ask(messages=asking(url(file(RED))), n=3)
    assert {choice.message.content for choice in several.choices} == {expected["red"]}
    made = client.responses.create(
        model="tiny",
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": url(file(RED)), "detail": "auto"},
                    {"type": "input_text", "text": "What is it?"},
                ],
            }
        ],
        max_output_tokens=10,
        temperature=0,
    )
    assert made.output_text == expected["red"]
    assert httpx2.get(f"{pictured}/v1/speculation").json()["media"] == ["image"]
    tokens = httpx2.post(f"{pictured}/tokenize", json={"messages": asking(url(file(RED)))}).json()
    plain = httpx2.post(f"{pictured}/tokenize", json={"messages": asking()}).json()
    assert tokens["count"] == plain["count"] + 4  # of the picture


def picture(address: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": address}


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (picture({"url": "/etc/passwd"}), "give a data URL"),
        (picture({"url": "file:///etc/passwd"}), "give a data URL"),
        (picture({"url": "data:image/png;base64,%"}), "not in base64"),
        (picture({"url": url(b"GIF")}), "part 0 is no picture"),
        (picture({"url": url(file(RED)[:60])}), "give a whole picture"),
        (picture({"url": url(b"0" * 1_000_001)}), "at most 1000000 go"),
        (picture({"url": "a", "detail": "high"}), "detail 'high'"),
        (picture({}), "give a text, a picture"),
        ({"type": "image", "image": "/etc/passwd"}, "give a text, a picture"),
        ({"type": "file", "file": {"file_id": "a"}}, "give a text, a picture"),
        ({"type": "input_audio", "input_audio": {"data": "AA=="}}, "text and pictures, no sounds"),
    ],
)
def test_parts_that_are_refused(pictured: str, part: Any, message: str) -> None:
    response = post(pictured, {"messages": [{"role": "user", "content": [part]}], **GREEDY})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert message in error["message"] and error["param"].startswith("messages")


def test_ten_thousand_pictures(pictured: str) -> None:
    parts = [picture({"url": "data:,"})] * 10_000
    response = post(pictured, {"messages": [{"role": "user", "content": parts}], **GREEDY})
    assert response.status_code == 400 and "at most 2048" in response.json()["error"]["message"]
    parts = parts[:100]
    response = post(pictured, {"messages": [{"role": "user", "content": parts}], **GREEDY})
    assert response.status_code == 400 and "at most 32 go" in response.json()["error"]["message"]


def test_pictures_that_unfold(pictured: str, expected: dict[str, str]) -> None:
    """A file of some kB that would be 100 megapixels is refused unread; the next one is read."""
    bomb = file(Image.new("1", (10_000, 10_000)))
    assert len(bomb) < 20_000
    response = post(pictured, {"messages": asking(url(bomb)), **GREEDY})
    assert "10000 x 10000 pixels, more than 10,000" in response.json()["error"]["message"]
    assert (
        content(post(pictured, {"messages": asking(url(file(RED))), **GREEDY})) == expected["red"]
    )


def test_arguments_of_the_processor_are_not_a_client_s(pictured: str, tmp_path: Path) -> None:
    """They would read files of the server."""
    RED.save(tmp_path / "own.png")
    for name, value in (("images", [str(tmp_path / "own.png")]), ("processor_kwargs", {"a": 1})):
        body = {"messages": asking(url(file(BLUE))), "chat_template_kwargs": {name: value}}
        response = post(pictured, body | GREEDY)
        assert response.status_code == 400, response.text
        assert f"holds '{name}', which is the processor's" in response.json()["error"]["message"]


def test_arguments_that_no_template_reads(pictured: str, expected: dict[str, str]) -> None:
    body = {"messages": asking(url(file(RED))), "chat_template_kwargs": {"do_resize": False}}
    assert content(post(pictured, body | GREEDY)) == expected["red"]


def test_tools_beside_pictures(pictured: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"messages": asking(url(file(RED))), "tools": [tool], **GREEDY}
    response = post(pictured, body)  # read as far as this model can be held to a grammar
    assert response.status_code == 400 and "EOS token and the model names none" in response.text


def test_pictures_of_other_roles(pictured: str) -> None:
    messages = asking(url(file(RED)))
    messages[0]["role"] = "system"
    response = post(pictured, {"messages": messages, **GREEDY})
    assert "of the role 'system'" in response.json()["error"]["message"]


def test_pictures_on_the_web(
    pictured: str, web: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only hosts that the operator names are asked, and never a private address, whatever a name
    stands for and wherever it is redirected to."""

    def told(path: str) -> str:
        response = post(pictured, {"messages": asking(path), **GREEDY})
        return response.json()["error"]["message"] if response.status_code == 400 else ""

    assert "hosts are pictures.test" in told("http://elsewhere.test/a.png")
    assert "hosts are pictures.test" in told("http://pictures.test@127.0.0.1/a.png")

    async def local(address: httpx2.URL, place: str) -> str:
        return "127.0.0.1"

    own = media._public
    monkeypatch.setattr(media, "_public", local)
    response = post(pictured, {"messages": asking(f"{web}/red.png"), **GREEDY})
    assert content(response) == expected["red"]
    assert "hosts are pictures.test" in told(f"{web}/away")
    assert "more than 1000000 bytes" in told(f"{web}/endless")
    assert "cannot be fetched (404)" in told(f"{web}/none")
    for status in (300, 301, 302, 303, 304, 307, 308, 399, 204, 500):  # without a Location
        assert f"cannot be fetched ({status})" in told(f"{web}/{status}")
    for path, port in (("port", 99999), ("zero", 0)):
        assert f"part 0 is on port {port}; give 1 to 65535" in told(f"{web}/{path}")
    assert "give 1 to 65535" in told("http://pictures.test:70000/red.png")
    assert "cannot be fetched (" in told(f"{web}/bracket")
    assert "redirected more than 3 times" in told(f"{web}/empty")  # to itself
    monkeypatch.setattr(media, "_public", own)

    async def found(*_: Any, **__: Any) -> list[Any]:
        return [(0, 0, 0, "", (number, 80)) for number in ("93.184.215.14", "10.0.0.1")]

    monkeypatch.setattr("asyncio.BaseEventLoop.getaddrinfo", found)
    assert "on a private or reserved network" in told("http://pictures.test/a.png")


PUBLIC = """
1.1.1.1 93.184.215.14 99.255.255.255 100.63.255.255 100.128.0.0 126.255.255.255 128.0.0.1
169.253.255.255 172.15.255.255 172.32.0.0 192.0.1.1 198.17.255.255 198.20.0.0 223.255.255.255
2001:200::1 2001:4860:4860::8888 2003::1 2400:cb00::1 2606:4700::1111 2a00:1450:4001::200e
"""
NOT_PUBLIC = """
0.0.0.0 0.1.2.3 10.1.2.3 100.64.0.1 100.100.100.200 127.0.0.1 168.63.129.16 169.254.169.254
172.16.0.1 172.31.255.255 192.0.0.1 192.0.0.9 192.0.2.1 192.88.99.1 192.168.0.1 198.18.0.1
198.19.255.255 198.51.100.1 203.0.113.1 224.0.0.1 239.255.255.255 240.0.0.1 255.255.255.255
:: ::1 ::127.0.0.1 ::8.8.8.8 ::ffff:10.0.0.1 ::ffff:8.8.8.8 ::ffff:0:127.0.0.1 64:ff9b::a00:1
64:ff9b::808:808 64:ff9b:1::7f00:1 100::1 100:0:0:1::1 2001::1 2001:0:53aa:64c:: 2001:1::1
2001:2::1 2001:10::1 2001:20::1 2001:30::1 2001:1ff::1 2001:db8::1 2002:a00:1:: 2002:808:808::
2606:4700::5efe:7f00:1 2606:4700::200:5efe:7f00:1 3fff::1 3fff:fff::1 4000::1 5f00::1 fc00::1
fd00:ec2::254 fe80::1 fe80::1%eth0 fec0::1 ff02::1 ffff:ffff::1
"""


def test_public_addresses() -> None:
    """Of all addresses, those of IANA's global unicast alone, whatever this Python knows."""
    assert [each for each in PUBLIC.split() if not is_public(each)] == []
    assert [each for each in NOT_PUBLIC.split() if is_public(each)] == []


def test_a_model_that_reads_text_only(tmp_path: Path) -> None:
    from served import pair

    with serving(*pair(tmp_path)) as (address, _):
        response = post(address, {"messages": asking(url(file(RED)))})
        assert "this model is served for text only" in response.json()["error"]["message"]
        answer = httpx2.post(f"{address}/v1/audio/transcriptions", files={"file": b"RIFF"})
        assert (
            answer.status_code == 400
            and "writes no speech down" in answer.json()["error"]["message"]
        )


# Speech


@pytest.fixture(scope="module")
def whispers(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    target, draft = whisper(tmp_path_factory.mktemp("whisper"))
    return str(target), str(draft)


@pytest.fixture(scope="module")
def spoken(whispers: tuple[str, str]) -> Iterator[str]:
    options = ServerOptions("tiny", drain=1.0, max_seconds=90, max_media=2_000_000)
    with serving(*whispers, options) as (address, _):
        yield address


GRANULARITIES = "timestamp_granularities[]"


def noise(seconds: float, rate: int = 16_000) -> bytes:
    sound = np.random.default_rng(0).standard_normal(int(seconds * rate)) * 0.1
    soundfile.write(held := io.BytesIO(), sound, rate, format="WAV", subtype="PCM_16")
    return held.getvalue()


def test_transcriptions_are_those_of_the_library(spoken: str, whispers: tuple[str, str]) -> None:
    spec = foretoken.load(*whispers, **LOADING)
    sound = noise(45)  # two windows
    made = transcribe(spec, sound, language="en", gamma=2)
    assert made.text and len(made.segments) > 1
    client = openai.OpenAI(base_url=f"{spoken}/v1", api_key="none", max_retries=0)
    ask: Any = partial(
        client.audio.transcriptions.create, model="tiny", file=("a.wav", sound), language="en"
    )
    answer = ask()
    assert answer.text == made.text and answer.usage.seconds == 45
    told = ask(response_format="verbose_json")
    assert (told.language, told.duration, told.text) == ("en", 45.0, made.text)
    assert [s.tokens for s in told.segments] == [s.tokens for s in made.segments]
    assert [(s.start, s.end) for s in told.segments] == [(s.start, s.end) for s in made.segments]
    units = ["word"]
    timed = ask(response_format="verbose_json", timestamp_granularities=units, prompt="a captain")
    known = transcribe(spec, sound, language="en", prompt="a captain", words=True, gamma=2)
    words = [word for segment in known.segments for word in segment.words or ()]
    assert [(w.word, w.start, w.end) for w in timed.words] == [
        (w.text, w.start, w.end) for w in words
    ]
    assert ask(response_format="srt") == as_srt(made)
    assert ask(response_format="vtt") == as_vtt(made)
    events = list(ask(stream=True))
    assert [event.type for event in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
    assert events[-1].text == made.text and len(events) > 2
    assert "".join(event.delta for event in events[:-1]).strip() == made.text
    files = {"file": ("a.wav", sound)}  # which the openai package calls deprecated
    english = httpx2.post(f"{spoken}/v1/audio/translations", files=files, timeout=60).json()
    assert english["text"] == transcribe(spec, sound, translate=True, gamma=2).text


@pytest.mark.parametrize(
    ("fields", "file", "message", "param"),
    [
        ({}, b"", "file: it is empty", "file"),
        ({}, b"no sound", "the file cannot be read", "file"),
        ({}, noise(100, 4000), "lasts 100 s, at most 90 go", "file"),
        ({"language": "xx"}, noise(1), "xx", None),
        ({"temperature": "hot"}, noise(1), "temperature", "temperature"),
        ({"response_format": "docx"}, noise(1), "response_format", "response_format"),
        ({"stream": "true", "response_format": "srt"}, noise(1), "leave one out", "stream"),
        ({"include[]": "logprobs"}, noise(1), "include[]", "include[]"),
        ({"model": "other"}, noise(1), "is not served here", "model"),
        ({GRANULARITIES: "word"}, noise(1), "are told in verbose_json", GRANULARITIES),
    ],
)  # fmt: skip
def test_forms_that_are_refused(
    spoken: str, fields: dict[str, str], file: bytes, message: str, param: str | None
) -> None:
    files = {"file": ("a.wav", file)}
    answer = httpx2.post(f"{spoken}/v1/audio/transcriptions", data=fields, files=files, timeout=60)
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert message in error["message"] and (param is None or error["param"] == param)


def test_a_cut_file_is_what_it_holds_whoever_came_before(spoken: str) -> None:
    """Nothing of another request's sound, and no length of its header."""
    samples = np.random.default_rng(0).standard_normal(10 * 16_000) * 0.1
    soundfile.write(held := io.BytesIO(), samples, 16_000, format="MP3")
    cut = held.getvalue()[: len(held.getvalue()) // 2]
    with soundfile.SoundFile(io.BytesIO(cut)) as opened:
        assert opened.frames > 9 * 16_000
        real = len(opened.read())

    def ask(name: str, data: bytes) -> dict[str, Any]:
        fields = {"language": "en", "response_format": "verbose_json"}
        path = f"{spoken}/v1/audio/transcriptions"
        return httpx2.post(path, data=fields, files={"file": (name, data)}, timeout=60).json()

    answers: list[dict[str, Any]] = []
    for seconds in (12, 5):
        ask("a.wav", noise(seconds))
        answers.append(ask("b.mp3", cut))
    assert answers[0] == answers[1]
    assert answers[0]["duration"] == real / 16_000 < 6
    assert answers[0]["usage"]["seconds"] == math.ceil(real / 16_000)


def test_a_model_that_writes_speech_down_is_asked_for_a_chat(spoken: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    answer = httpx2.post(f"{spoken}/v1/chat/completions", json=body)
    assert answer.status_code == 400 and "/v1/audio/transcriptions" in answer.text
    answer = httpx2.post(f"{spoken}/v1/completions", json={"prompt": "Hello"})
    assert answer.status_code == 400 and "transcri" in answer.text


def test_no_form(spoken: str) -> None:
    for path in ("transcriptions", "translations"):
        answer = httpx2.post(f"{spoken}/v1/audio/{path}", json={"model": "tiny"})
        assert answer.status_code == 400
        told = answer.json()["error"]["message"]
        assert told == "send a form, with Content-Type: multipart/form-data"
    files = {"file": ("a.wav", b"0" * 2_200_000)}
    answer = httpx2.post(f"{spoken}/v1/audio/transcriptions", files=files)
    assert answer.status_code == 413 and "--max-media allows" in answer.text
    twice = [("file", ("a.wav", noise(1))), ("file", ("b.wav", noise(1)))]
    answer = httpx2.post(f"{spoken}/v1/audio/transcriptions", files=twice)
    assert answer.status_code == 400 and "file is given twice" in answer.text
    document = httpx2.get(f"{spoken}/openapi.json").json()
    body = document["paths"]["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]
    assert set(body["multipart/form-data"]["schema"]["properties"]) >= {
        "file",
        "language",
        "stream",
    }


def test_silence_of_hours_in_a_few_bytes(spoken: str) -> None:
    """A FLAC of silence unfolds ten-thousandfold; its header is asked first."""
    soundfile.write(held := io.BytesIO(), np.zeros(16_000 * 3600, "int16"), 16_000, format="FLAC")
    assert len(held.getvalue()) < 300_000
    files = {"file": ("a.flac", held.getvalue())}
    answer = httpx2.post(f"{spoken}/v1/audio/transcriptions", files=files, timeout=60)
    assert "lasts 3600 s" in answer.json()["error"]["message"]


def test_a_client_that_leaves_frees_its_place(spoken: str) -> None:
    files = {"file": ("a.wav", noise(60))}
    with httpx2.stream(
        "POST", f"{spoken}/v1/audio/transcriptions", data={"stream": "true"}, files=files
    ) as answer:
        next(answer.iter_lines())
    data = {"language": "en"}
    again = httpx2.post(
        f"{spoken}/v1/audio/transcriptions",
        data=data,
        files={"file": ("a.wav", noise(1))},
        timeout=60,
    )
    assert json.loads(again.text)["text"] is not None
