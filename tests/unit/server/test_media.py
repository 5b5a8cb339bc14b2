"""Pictures, sounds and speech, as clients send them to the server; and all that they may not."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterator
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
from foretoken.media.transcripts import to_srt, to_vtt
from foretoken.server import media
from foretoken.server.media import is_public
from foretoken.server.options import ServerOptions
from foretoken.speech.transcription import transcribe
from pictured import llava_folder
from served import BAD_REQUESTS, LOADING, require_refused, serving
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
    for name, files in (("red", [file(RED)]), ("both", [file(RED), file(BLUE, "BMP")])):
        body = {"messages": asking(*map(url, files)), "n": 2, **GREEDY}
        choices = post(pictured, body).json()["choices"]
        assert [choice["message"]["content"] for choice in choices] == [expected[name]] * 2
    image = {"type": "input_image", "image_url": url(file(RED)), "detail": "auto"}
    content = [image, {"type": "input_text", "text": "What is it?"}]
    asked: Any = {"model": "tiny", "input": [{"role": "user", "content": content}]}
    asked |= {"max_output_tokens": 10, "temperature": 0}
    with openai.OpenAI(base_url=f"{pictured}/v1", api_key="none", max_retries=0) as client:
        assert client.responses.create(**asked).output_text == expected["red"]
        events = [*client.responses.create(**asked, stream=True)]
    assert events[-1].response.output_text == expected["red"]  # pyright: ignore
    assert httpx2.get(f"{pictured}/v1/speculation").json()["media"] == ["image"]
    with_one, plain = (
        httpx2.post(f"{pictured}/tokenize", json={"messages": asking(*pictures)}).json()["count"]
        for pictures in ([url(file(RED))], [])
    )
    assert with_one == plain + 4  # of the picture


@pytest.mark.parametrize("path", BAD_REQUESTS["images"])
def test_bad_requests_name_their_field(pictured: str, path: str) -> None:
    require_refused(pictured, "images", path)


def test_pictures_that_unfold(pictured: str, expected: dict[str, str]) -> None:
    """A file of some kB that would be 100 megapixels is refused unread; the next one is read."""
    bomb = file(Image.new("1", (10_000, 10_000)))
    assert len(bomb) < 20_000
    response = post(pictured, {"messages": asking(url(bomb)), **GREEDY})
    assert "10000 x 10000 pixels, more than 10,000" in response.json()["error"]["message"]
    assert (
        content(post(pictured, {"messages": asking(url(file(RED))), **GREEDY})) == expected["red"]
    )


def test_arguments_that_no_template_reads(pictured: str, expected: dict[str, str]) -> None:
    body = {"messages": asking(url(file(RED))), "chat_template_kwargs": {"do_resize": False}}
    assert content(post(pictured, body | GREEDY)) == expected["red"]


def test_pictures_on_the_web(
    pictured: str, web: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only hosts that the operator names are asked, and never a private address, whatever a name
    stands for and wherever it is redirected to."""

    def told(path: str) -> str:
        response = post(pictured, {"messages": asking(path), **GREEDY})
        return response.json()["error"]["message"] if response.status_code == 400 else ""

    async def local(address: httpx2.URL, place: str) -> str:
        return "127.0.0.1"

    own = media._resolve_public_address
    monkeypatch.setattr(media, "_resolve_public_address", local)
    response = post(pictured, {"messages": asking(f"{web}/red.png"), **GREEDY})
    assert content(response) == expected["red"]
    assert "use pictures.test" in told(f"{web}/away")
    assert "more than 1000000 bytes" in told(f"{web}/endless")
    assert "cannot be fetched (status 404)" in told(f"{web}/none")
    for status in (300, 301, 302, 303, 304, 307, 308, 399, 204, 500):  # without a Location
        assert f"cannot be fetched (status {status})" in told(f"{web}/{status}")
    for path, port in (("port", 99999), ("zero", 0)):
        assert f"part 0 is on port {port}; give a port from 1" in told(f"{web}/{path}")
    assert "cannot be fetched (" in told(f"{web}/bracket")
    assert "redirected more than 3 times" in told(f"{web}/empty")  # to itself
    monkeypatch.setattr(media, "_resolve_public_address", own)

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


def noise(seconds: float, rate: int = 16_000) -> bytes:
    sound = np.random.default_rng(0).standard_normal(int(seconds * rate)) * 0.1
    soundfile.write(held := io.BytesIO(), sound, rate, format="WAV", subtype="PCM_16")
    return held.getvalue()


def send(address: str, sound: Any, path: str = "transcriptions", **fields: Any) -> httpx2.Response:
    files = sound if isinstance(sound, list) else {"file": ("a.wav", sound)}
    return httpx2.post(f"{address}/v1/audio/{path}", data=fields, files=files, timeout=60)


@pytest.fixture
def client(spoken: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{spoken}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_transcriptions_are_those_of_the_library(
    spoken: str, client: openai.OpenAI, whispers: tuple[str, str]
) -> None:
    spec = foretoken.load(*whispers, **LOADING)
    long, short = noise(31), noise(3)  # two windows, and one
    create = client.audio.transcriptions.create

    def ask(sound: bytes, **more: Any) -> Any:
        return create(model="tiny", file=("a.wav", sound), language="en", **more)

    made = transcribe(spec, long, language="en", gamma=2)
    assert made.text and len(made.segments) > 1
    answer = ask(long)
    assert answer.text == made.text and answer.usage.seconds == 31
    *events, last = list(ask(long, stream=True))
    assert {event.type for event in events} == {"transcript.text.delta"} and len(events) > 1
    assert "".join(event.delta for event in events).strip() == made.text == last.text

    made = transcribe(spec, short, language="en", prompt="a captain", words=True, gamma=2)
    timed: Any = {"response_format": "verbose_json", "prompt": "a captain"}
    told = ask(short, timestamp_granularities=["word", "segment"], **timed)
    assert (told.language, told.duration, told.text) == ("en", 3.0, made.text)
    words = [word for segment in made.segments for word in segment.words or ()]
    assert [(w.word, w.start, w.end) for w in told.words] == [
        (w.text, w.start, w.end) for w in words
    ]
    assert [(s.start, s.end, s.tokens) for s in told.segments] == [
        (s.start, s.end, s.tokens) for s in made.segments
    ]
    for form, written in (("srt", to_srt), ("vtt", to_vtt)):
        assert ask(short, response_format=form, prompt="a captain") == written(made)
    english = send(spoken, short, "translations").json()
    assert english["text"] == transcribe(spec, short, translate=True, gamma=2).text


SILENCE = io.BytesIO()  # unfolds ten-thousandfold; its header is asked first
soundfile.write(SILENCE, np.zeros(16_000 * 3600, "int16"), 16_000, format="FLAC")


def test_forms_that_are_refused(spoken: str) -> None:
    for fields, file, status, param in (
        ({}, b"", 400, "file"),
        ({}, b"no sound", 400, "file"),
        ({}, noise(100, 4000), 400, "file"),
        ({}, SILENCE.getvalue(), 400, "file"),
        ({}, b"0" * 2_200_000, 413, None),
        ({}, [("file", ("a.wav", noise(1))), ("file", ("b.wav", noise(1)))], 400, "file"),
        ({"language": "xx"}, noise(1), 400, None),
        ({"temperature": "hot"}, noise(1), 400, "temperature"),
        ({"response_format": "docx"}, noise(1), 400, "response_format"),
        ({"stream": "true", "response_format": "srt"}, noise(1), 400, "stream"),
        ({"include[]": "logprobs"}, noise(1), 400, "include[]"),
        ({"model": "other"}, noise(1), 404, "model"),
        ({"timestamp_granularities[]": "word"}, noise(1), 400, "timestamp_granularities[]"),
    ):
        answer = send(spoken, file, **fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param), (fields, error)
    for path in ("transcriptions", "translations"):
        answer = httpx2.post(f"{spoken}/v1/audio/{path}", json={"model": "tiny"})
        assert answer.status_code == 400 and "send a form" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", BAD_REQUESTS["speech"])
def test_other_requests_are_sent_to_transcriptions(spoken: str, path: str) -> None:
    require_refused(spoken, "speech", path)


def test_a_cut_file_is_what_it_holds_whoever_came_before(spoken: str) -> None:
    """Nothing of another request's sound, and no length of its header."""
    samples = np.random.default_rng(0).standard_normal(10 * 16_000) * 0.1
    soundfile.write(held := io.BytesIO(), samples, 16_000, format="MP3")
    cut = held.getvalue()[: len(held.getvalue()) // 2]
    with soundfile.SoundFile(io.BytesIO(cut)) as opened:
        assert opened.frames > 9 * 16_000
        real = len(opened.read())

    answers: list[dict[str, Any]] = []
    for seconds in (12, 5):
        send(spoken, noise(seconds))
        asked = {"language": "en", "response_format": "verbose_json"}
        answers.append(send(spoken, cut, **asked).json())
    assert answers[0] == answers[1]
    assert answers[0]["duration"] == real / 16_000 < 6
    assert answers[0]["usage"]["seconds"] == math.ceil(real / 16_000)


def test_a_client_that_leaves_frees_its_place(spoken: str) -> None:
    files, path = {"file": ("a.wav", noise(31))}, f"{spoken}/v1/audio/transcriptions"
    with httpx2.stream("POST", path, data={"stream": "true"}, files=files) as answer:
        next(answer.iter_lines())
    assert send(spoken, noise(1), language="en").json()["text"] is not None
