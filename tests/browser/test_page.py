"""The server's page in Debian's chromium (`pip install playwright`, `apt install chromium`, and no
other browser): what a reader sees of a real server's streams."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import soundfile
from PIL import Image

from foretoken.server.options import ServerOptions
from foretoken.server.process.messages import EngineSetup
from pictured import llava_folder
from served import LOADING, pair, serving, serving_all, until
from speech import whisper

sync = pytest.importorskip("playwright.sync_api", reason="needs playwright, which is not installed")
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("needs chromium, which is not installed", allow_module_level=True)

SAMPLING = {"temperature": "1", "seed": "7", "gamma": "3", "max_tokens": "48"}
LONG = SAMPLING | {"max_tokens": "900"}
WEATHER = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
WEATHER |= {"additionalProperties": False}
TOOLS = json.dumps([{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}])
CALLING = SAMPLING | {"tools": TOOLS, "tool_choice": "required", "max_tokens": "160"}
Opened = Callable[..., Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return pair(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def url(folders: tuple[str, str]) -> Iterator[str]:
    with serving(*folders) as (address, _):
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync.sync_playwright() as playwright:
        heard = ("ui-for-media-stream", "device-for-media-stream")  # a microphone that beeps
        args = ["--no-sandbox", *(f"--use-fake-{each}" for each in heard)]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=args)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any, url: str) -> Iterator[Opened]:
    """Opens the page; whatever it logs as an error fails the test, answers that it shows apart."""
    contexts: list[Any] = []
    problems: list[str] = []

    def heard(message: Any) -> None:
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            problems.append(message.text)

    def open_page(at: str = url, **options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("console", heard)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(at)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not problems


def send(
    page: Any, prompt: str = "Hello", sampling: dict[str, str] = SAMPLING, **more: str
) -> None:
    """Types a prompt, with controls, and presses Enter."""
    page.wait_for_selector("#send:enabled")
    if not page.is_visible("[name=seed]"):
        page.click("#settings summary")
    for name, value in (sampling | more).items():
        field = page.locator(f"[name={name}]")
        chosen = name in ("gamma", "tool_choice")
        field.select_option(value) if chosen else field.fill(value)
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")


def finished(page: Any) -> Any:
    """The last answer, once it has ended."""
    page.wait_for_selector(".turn:last-child .answer:last-child[data-state=done]")
    return page.locator(".turn:last-child .answer").first


def made(answer: Any) -> str:
    """Its text, without the draft tokens that were refused."""
    return "".join(answer.locator("[data-source]").all_text_contents())


def colour(page: Any, selector: str) -> tuple[int, int, int]:
    style = page.locator(f"#turns {selector}").first.evaluate("e => getComputedStyle(e).color")
    red, green, blue = (int(part) for part in re.findall(r"\d+", style)[:3])
    return red, green, blue


def test_a_text_is_that_of_the_api_in_the_colours_of_the_paper(opened: Opened, url: str) -> None:
    page = opened()
    send(page)
    answer = finished(page)
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "temperature": 1,
        "seed": 7,
        "max_tokens": 48,
        "speculation": {"gamma": 3},
    }
    reply = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    assert made(answer) == reply["choices"][0]["message"]["content"] != ""
    for selector, channel in ((".accepted", 1), (".rejected", 0), (".corrected", 2)):
        shades = colour(page, selector)
        assert max(shades) == shades[channel] > 2 * sorted(shades)[0], selector
    page.check("[name=view][value=text]")
    assert colour(page, ".accepted") == colour(page, ".corrected")
    assert not page.locator("#turns .rejected").first.is_visible()


def test_an_answer_has_the_sampling_and_limit_of_the_command_line(opened: Opened, url: str) -> None:
    """Greedy where the model's generation config asks for nothing; what is left out, the server
    fills in."""
    page = opened()
    page.wait_for_selector("#send:enabled")
    context = httpx2.get(f"{url}/speculation").json()["context"]
    names = ("temperature", "top_p", "max_tokens")
    assert [page.locator(f"[name={name}]").input_value() for name in names] == [
        "0",
        "",
        str(min(1024, context // 2)),
    ]


def test_colours_are_never_the_only_sign(opened: Opened) -> None:
    page = opened()
    send(page)
    finished(page)

    def line(selector: str) -> str:
        element = page.locator(f"#turns {selector}").first
        return element.evaluate("e => getComputedStyle(e).textDecorationLine")

    assert (line(".accepted"), line(".corrected")) == ("none", "underline")
    assert line(".rejected") == "line-through"
    draft_tokens = page.locator("#turns .guess")
    assert draft_tokens.count() and all(
        draft_tokens.nth(i).get_attribute("aria-hidden") == "true"
        for i in range(draft_tokens.count())
    )


def test_a_reader_hears_the_finished_text_once(opened: Opened) -> None:
    page = opened()
    send(page)
    answer = finished(page)
    page.wait_for_selector("#announcer:not(:empty)", state="attached")
    assert page.text_content("#announcer") == made(answer)
    assert answer.locator("[aria-live]").count() == 0


def test_measurements_are_those_of_the_steps(opened: Opened) -> None:
    page = opened()
    send(page)
    answer = finished(page)
    steps = answer.locator(".step").count()
    tokens = answer.locator("[data-source]").count()
    assert f"{tokens} tokens · {steps} target calls" in answer.locator(".facts").inner_text()
    page.wait_for_selector(f"#this strong:text-is('{tokens / steps:.2f}')")
    assert page.locator("#positions tr").count() == 3
    assert page.locator(".timeline rect.target").count() == steps
    page.focus(".scroller")
    page.keyboard.press("ArrowRight")
    assert page.locator(".step.on").get_attribute("data-step") == "0"
    assert page.text_content(".readout").startswith("Step 1: ")


def test_escape_stops_a_text_and_frees_its_row(opened: Opened, url: str) -> None:
    page = opened()
    send(page, sampling=LONG)
    page.wait_for_selector("#turns .step")
    page.keyboard.press("Escape")
    page.wait_for_selector(".answer[data-state=stopped]")
    assert "Stopped." in page.locator(".facts").inner_text()
    assert 0 < page.locator("#turns [data-source]").count() < 900
    until(lambda: httpx2.get(f"{url}/v1/speculation").json()["running"] == 0, 5)
    assert page.text_content("#send") == "Send"


def test_conversations_stream_side_by_side_and_each_stops_alone(opened: Opened) -> None:
    page = opened()

    def without_end(route: Any) -> None:
        """The random target would end some texts before anybody can click."""
        asked = json.loads(route.request.post_data) | {"ignore_eos": True}
        route.continue_(post_data=json.dumps(asked))

    page.route("**/v1/*completions", without_end)
    page.route("**/v1/chat/completions", without_end)
    send(page, "First", LONG)
    page.click("#new")
    send(page, "Second", LONG)
    page.wait_for_selector("#list li.open >> nth=1")
    page.click("button[aria-label='Stop: First']")
    page.wait_for_selector("#list li:not(.open)")
    assert page.locator("#list li.open").inner_text().startswith("Second")
    page.click("button[aria-label='Stop: Second']")
    page.wait_for_selector(".answer[data-state=stopped]")
    page.click("#list .title >> text=First")
    assert page.locator(".asked").inner_text() == "First"


def test_plain_decoding_beside_it_writes_the_same_at_temperature_0(opened: Opened) -> None:
    page = opened()
    send(page, temperature="0")
    finished(page)
    page.click("text=Decode plainly")
    page.wait_for_selector(".verdict:not(:empty)")
    assert "The outputs are identical." in page.locator(".verdict").inner_text()
    plain = page.locator(".answer.plain")
    runs = plain.locator(".step").count()
    assert plain.locator("[data-source=plain]").count() == runs > 0
    assert page.locator(".timeline rect.plain").count() == runs
    page.wait_for_selector("#speedups div:last-child dd:not(.none)")


def test_what_the_server_refuses_is_shown(opened: Opened) -> None:
    page = opened()
    send(page, temperature="-1")
    page.wait_for_selector("[role=alert] p")
    assert "temperature" in page.locator(".error p").inner_text()
    page.fill("[name=temperature]", "1")
    page.fill("#prompt", "Hello")
    page.press("#prompt", "Enter")
    finished(page)


def test_an_error_within_a_stream_is_shown_below_the_text(opened: Opened) -> None:
    page = opened()
    step = {"tokens": [{"id": 1, "text": "So", "source": "plain"}], "rejected": [], "gamma": 0}
    step |= {"draft_seconds": 0, "target_seconds": 0.01, "verify_seconds": 0.001, "rows": 1}
    first = {"choices": [{"delta": {"content": "So"}}], "speculation": {"steps": [step]}}
    second = {"error": {"message": "the engine stopped"}}
    stream = "".join(f"data: {json.dumps(each)}\n\n" for each in (first, second))
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=stream))
    send(page)
    page.wait_for_selector(".error p")
    assert page.locator(".error p").inner_text() == "the engine stopped"
    assert page.locator(".made").inner_text() == "So"


def answered(page: Any, text: str) -> None:
    """Send a prompt that is answered by this text, in one step."""
    replied(page, (text, {"content": text}))


def replied(page: Any, *parts: tuple[str, dict[str, Any]], prompt: str = "Hello") -> None:
    """Send a prompt that is answered in these steps: what a token spells, and the delta of it."""
    stream = ""
    for spelled, delta in parts:
        token = {"id": 1, "text": spelled, "source": "plain"}
        step = {"tokens": [token], "rejected": [], "gamma": 0, "rows": 1}
        step |= {"draft_seconds": 0, "target_seconds": 0.01, "verify_seconds": 0.001}
        chunk = {"choices": [{"delta": delta}], "speculation": {"steps": [step]}}
        stream += f"data: {json.dumps(chunk)}\n\n"
    body = f"{stream}data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))
    send(page, prompt)
    page.wait_for_selector(f".asked:text-is('{prompt}')")
    finished(page)


def test_a_call_is_shown_and_answered_from_the_keyboard(opened: Opened) -> None:
    page = opened()
    bodies: list[Any] = []
    page.on("request", lambda each: bodies.append(each.post_data_json) if each.post_data else None)
    send(page, sampling=CALLING)
    answer = finished(page)
    call = page.get_by_role("region", name="Call to weather").first
    assert json.loads(call.locator("pre").inner_text()) == {"city": "Rome"}
    assert call.locator("pre").inner_text() == '{\n  "city": "Rome"\n}'
    assert "ended with a tool call" in answer.locator(".facts").inner_text()
    assert "tool_call" not in answer.inner_text()  # its marks; steps show them
    page.wait_for_selector("#announcer:has-text('Call to weather: {')", state="attached")
    page.check("[name=view][value=runs]")
    assert page.locator("[data-kind=call]").first.is_visible()
    assert "weather" in made(answer)
    page.check("[name=view][value=text]")

    page.select_option("[name=tool_choice]", "none")
    call.locator("pre").focus()
    for _ in range(8):  # as many calls as there are, each with two places
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('.call textarea')"):
            break
    page.keyboard.type("sunny")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn >> nth=1")
    finished(page)
    asked, said, *results = bodies[-1]["messages"]
    assert asked == {"role": "user", "content": "Hello"}
    assert said["role"] == "assistant" and said["content"] is None
    ids = [each["id"] for each in said["tool_calls"]]
    assert [each["function"]["name"] for each in said["tool_calls"]] == ["weather"] * len(ids)
    told = {"role": "tool", "tool_call_id": ids[0], "content": "sunny"}
    assert results[0] == told and [each["tool_call_id"] for each in results] == ids
    assert page.locator(".asked").count() == 1


def test_reasoning_stands_above_the_text_open_while_it_is_alone(opened: Opened) -> None:
    page = opened()
    thought = [("<think>", {"content": ""}), ("Hm", {"reasoning_content": "Hm <b>"})]
    replied(page, *thought)
    assert page.locator("details.reasoning[open]").inner_text() == "Reasoning\n\nHm <b>"
    assert page.locator(".turn .text").inner_text() == ""
    replied(page, *thought, ("</think>", {"content": ""}), ("Yes", {"content": "Yes"}), prompt="B")
    last = page.locator(".turn:last-child")
    assert last.locator(".text").inner_text() == "Yes"
    assert last.locator("details.reasoning:not([open])").count() == 1
    summary = last.locator(".reasoning summary")
    summary.focus()
    page.keyboard.press("Enter")
    assert last.locator(".reasoning p").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_call_that_is_cut_off_is_readable_on_a_phone(opened: Opened, scheme: str) -> None:
    page = opened(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    head = {"index": 0, "id": "a", "function": {"name": "f" * 60, "arguments": ""}}
    pieces = ['{"a": [1, 12345678901234567890], "b": {}, "c": "', "x" * 90]
    rest = [{"index": 0, "function": {"arguments": piece}} for piece in pieces]
    thoughts = ("", {"reasoning_content": "y" * 90})
    replied(page, thoughts, *[("", {"tool_calls": [each]}) for each in (head, *rest)])
    shown = page.locator(".call pre").inner_text()
    assert shown.split("\n")[:4] == ["{", '  "a": [', "    1,", "    12345678901234567890"]
    assert shown.endswith('  "b": {},\n  "c": "' + "x" * 90)
    page.click(".reasoning summary")
    page.fill(".call textarea", "z" * 90)
    for element in ("document.documentElement", "document.getElementById('thread')"):
        assert page.evaluate(f"{element}.scrollWidth <= {element}.clientWidth"), element


def test_tools_that_are_no_list_are_refused_beside_the_field(opened: Opened) -> None:
    page = opened()
    page.wait_for_selector("#send:enabled")
    if not page.is_visible("[name=seed]"):
        page.click("#settings summary")
    page.fill("[name=tools]", '{"type": "function"')
    assert page.inner_text("#tools-problem").startswith("Tools must be a list in JSON")
    page.click("#settings summary")
    page.fill("#prompt", "Hello")
    page.press("#prompt", "Enter")
    assert page.locator(".turn").count() == 0
    assert page.evaluate("document.activeElement.name") == "tools"
    page.fill("[name=tools]", "")
    assert page.text_content("#tools-problem") == ""
    page.press("#prompt", "Enter")
    finished(page)


def test_nothing_that_a_model_writes_is_markup(opened: Opened) -> None:
    page = opened()
    text = "<img src=x onerror=document.title='run'>"
    answered(page, text)
    assert page.locator(".made").inner_text() == text
    assert page.locator("main img").count() == 0 and page.title() == "foretoken"


@pytest.mark.parametrize(
    ("text", "spellings", "parts"),
    [
        ("a\U0001f600b", ["a", "\ufffd", "\ufffd", "b"], ["a", "", "\U0001f600", "b"]),
        ("one", ["one", " two"], ["one", ""]),  # cut at a stop string
        ("one t", ["one", " two"], ["one", " t"]),
        ("The end", [" The", " end"], ["The", " end"]),  # a first space that decoding drops
        ("done", ["done", "</s>"], ["done", ""]),
    ],
)
def test_tokens_that_do_not_spell_the_text_share_it(
    opened: Opened, text: str, spellings: list[str], parts: list[str]
) -> None:
    page = opened()
    run = "async ([t, s]) => (await import('/page/tokens.js')).cut(t, s)"
    assert page.evaluate(run, [text, spellings]) == parts


def test_an_engine_that_loads_is_waited_for(opened: Opened, url: str) -> None:
    page = opened("about:blank")
    body = json.dumps({"error": {"message": "the model is loading"}})
    page.route("**/v1/speculation*", lambda route: route.fulfill(status=503, body=body))
    page.goto(url)
    page.wait_for_selector("#banner:not(:empty)")
    assert page.text_content("#banner") == "The model is loading. Trying again."
    assert page.is_disabled("#send")
    page.unroute("**/v1/speculation*")
    page.wait_for_selector("#send:enabled")
    assert page.text_content("#banner") == ""


def test_a_key_is_asked_for_and_kept_in_the_tab_only(
    opened: Opened, folders: tuple[str, str]
) -> None:
    with serving(*folders, ServerOptions("tiny", api_key=("right",), drain=1.0)) as (url, _):
        page = opened(url)
        page.wait_for_selector("#key")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.wait_for_selector("#refused:not(:empty)")
        page.fill("#key", "right")
        page.press("#key", "Enter")
        page.wait_for_selector("#door", state="hidden")
        send(page)
        finished(page)
        assert page.evaluate("Object.values(sessionStorage)") == ["right"]
        assert page.evaluate("Object.keys(localStorage)") == ["foretoken-settings"]  # left open
        page.goto("about:blank")


def test_settings_are_closed_until_a_reader_opens_them(opened: Opened) -> None:
    """And then open the next time too."""
    page = opened(viewport={"width": 1440, "height": 900})
    assert not page.is_visible("[name=seed]")
    page.click("#settings summary")
    assert page.is_visible("[name=seed]")
    page.reload()
    page.wait_for_selector("[name=seed]", state="visible")
    page.click("#settings summary")
    page.reload()
    page.wait_for_selector("#send:enabled")
    assert not page.is_visible("[name=seed]")


@pytest.mark.parametrize("width", [1440, 1180, 390])
def test_what_settings_are_left_out_for_is_not_cut(opened: Opened, width: int) -> None:
    page = opened(viewport={"width": width, "height": 900})
    page.click("#settings summary")
    assert page.evaluate("""() => {
      const seed = document.querySelector("[name=seed]");
      const line = document.createElement("canvas").getContext("2d");
      const style = getComputedStyle(seed);
      line.font = `${style.fontSize} ${style.fontFamily}`;
      const arrows = 18; // of a number field, shown when it is pointed at
      const room = seed.clientWidth - parseFloat(style.paddingLeft) * 2 - arrows;
      return line.measureText(seed.placeholder).width <= room;
    }""")


def test_speed_ups_say_what_they_are_of(opened: Opened) -> None:
    page = opened()
    answer = {"predicted_speedup": 2.41}

    def told(route: Any) -> None:
        route.fulfill(json=route.fetch().json() | answer)

    page.route("**/v1/speculation*", told)
    page.reload()
    page.wait_for_selector("#speedups dd:text-is('2.41×')")
    said = page.inner_text("#speedups")
    assert "Predicted by Theorem 3.8" in said and "numbers of draft tokens per step so far" in said


def test_the_pages_own_speed_up_is_of_texts_decoded_both_ways(opened: Opened) -> None:
    """A text that was only sampled has no say beside a greedy one that was decoded both ways."""
    page = opened()
    run = """async () => (await import('/page/run.js')).speedup([
      [{state: 'done', steps: [{tokens: [1, 2], rejected: []}], totals: {seconds: 1}},
       {state: 'done', steps: [{tokens: [1, 2], rejected: []}], totals: {seconds: 3}}],
      [{state: 'done', steps: [{tokens: [1], rejected: []}], totals: {seconds: 9}},
       {state: 'writing', steps: [{tokens: [1], rejected: []}], totals: null}],
    ])"""
    assert page.evaluate(run) == {"factor": 3, "texts": 1}


MARKDOWN = """\
# Rejection *sampling*

Draw from **q**, keep with `min(1, p/q)`,
then __go on__. It is snake_case_here and 2 * 3 * 4.

1. first
2. second
   - inner one
   - inner two

> said
> twice

| a | b |
|---|---|
| 1 | 2 |

```python
if a < b: # not a heading
    *no emphasis*
```
---
A [link](https://example.org/x_y) and [none](javascript:alert(1)).
Open **bold and `code"""

AS_ELEMENTS = (
    "<h3>Rejection <em>sampling</em></h3>"
    "<p>Draw from <strong>q</strong>, keep with <code>min(1, p/q)</code>,\n"
    "then <strong>go on</strong>. It is snake_case_here and 2 * 3 * 4.</p>"
    "<ol><li><p>first</p></li><li><p>second</p>"
    "<ul><li><p>inner one</p></li><li><p>inner two</p></li></ul></li></ol>"
    "<blockquote><p>said\ntwice</p></blockquote>"
    '<div class="wide-table"><table><thead><tr><th>a</th><th>b</th></tr></thead>'
    "<tbody><tr><td>1</td><td>2</td></tr></tbody></table></div>"
    '<pre tabindex="0"><code>if a &lt; b: # not a heading\n    *no emphasis*</code></pre><hr>'
    '<p>A <a href="https://example.org/x_y" target="_blank" rel="noopener noreferrer">link</a> and '
    "[none](javascript:alert(1)).\nOpen **bold and `code</p>"
)

HOSTILE = [
    "<script>document.title='run'</script>",
    "<img src=x onerror=document.title='run'>",
    "**<b onclick=x>**",
    "[x](javascript:document.title='run')",
    "[x](data:text/html,<script>1</script>)",
    '[x](https://a.b/"onmouseover="1)',
    "```\n</code></pre><img src=x onerror=document.title='run'>",
    "> " * 40 + "deep",
    "![x](https://a.b/pixel.png)",
]


def rendered(page: Any, text: str) -> str:
    run = """async (text) => {
      const { markdown } = await import('/page/markdown.js');
      const element = document.createElement('div');
      element.append(...markdown(text));
      document.body.append(element);
      return element.innerHTML;
    }"""
    return page.evaluate(run, text)


def test_markdown_becomes_elements(opened: Opened) -> None:
    assert rendered(opened(), MARKDOWN) == AS_ELEMENTS


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_makes_only_its_own_elements(opened: Opened, text: str) -> None:
    page = opened()
    html = rendered(page, text)
    assert not re.search(r"<(script|img|b)\b|<[^>]*\son\w+=", html), html
    links = re.findall('href="([^"]*)"', html)
    assert all(link.startswith("https://") for link in links)
    assert page.title() == "foretoken"


@pytest.mark.parametrize(
    "piece", ["**a ", "`", "[", "* ", "> ", "_a", "|", "~~a", "\n", "1. a\n\n"]
)
def test_markdown_of_nothing_but_marks_is_read(opened: Opened, piece: str) -> None:
    """Whatever a model repeats: nothing is lost, and nothing takes time without end."""
    page = opened()
    page.set_default_timeout(30_000)
    assert isinstance(rendered(page, piece * (20_000 // len(piece))), str)


def test_text_shows_an_answers_markdown_and_tokens_show_it_as_written(opened: Opened) -> None:
    page = opened()
    text = "Two **bold** words"
    answered(page, text)
    assert page.locator("#turns .text").inner_text() == text
    page.check("[name=view][value=text]")
    page.wait_for_selector("#turns .prose strong:text-is('bold')")
    assert page.locator("#turns .text").inner_text() == "Two bold words"
    page.check("[name=view][value=tokens]")
    assert page.locator("#turns .text").inner_text() == text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_narrow_screens(opened: Opened, scheme: str) -> None:
    page = opened(viewport={"width": 390, "height": 844}, color_scheme=scheme)
    send(page)
    finished(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate("document.getElementById('thread').scrollWidth") <= 390
    page.click("[aria-controls=measures]")
    page.wait_for_selector("#positions table", state="visible")
    page.keyboard.press("Escape")
    page.wait_for_selector("#positions table", state="hidden")
    assert page.evaluate("document.activeElement.getAttribute('aria-controls')") == "measures"


def test_one_of_several_models_is_chosen(
    opened: Opened, url: str, folders: tuple[str, str]
) -> None:
    """The engines stand for a base and an adapter: which weights are theirs is no page's affair."""
    setup = EngineSetup(*folders, LOADING, {"max_rows": 4})
    with serving_all({"tiny": setup, "fast": setup}, ServerOptions("tiny", drain=1.0)) as (at, _):
        page = opened(at)
        asked: list[Any] = []
        page.on("request", lambda r: r.method == "POST" and asked.append(r.post_data_json["model"]))
        send(page)
        finished(page)
        page.select_option("[name=model]", "fast")
        page.wait_for_selector("#server dd:text-is('fast')")
        send(page)
        page.wait_for_selector(".turn:nth-child(2) .answer[data-state=done]")
        assert asked == ["tiny", "fast"]
    alone = opened(url)
    alone.wait_for_selector("#send:enabled")
    alone.click("#settings summary")
    assert not alone.is_visible("[name=model]")


# Pictures and sounds


@pytest.fixture(scope="module")
def pictured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = llava_folder(tmp_path_factory.mktemp("llava"))
    with serving(str(folder), "lookup", ServerOptions("tiny", drain=1.0)) as (address, _):
        yield address


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    target, draft = whisper(tmp_path_factory.mktemp("whisper"))
    with serving(str(target), str(draft), ServerOptions("tiny", drain=1.0)) as (address, _):
        yield address


def picture(folder: Path, colour: str, size: tuple[int, int] = (40, 30)) -> Path:
    Image.new("RGB", size, colour).save(path := folder / f"{colour}.png")
    return path


def tone(path: Path, seconds: int) -> Path:
    """A tone of 440 Hz, louder on the left."""
    wave = np.sin(2 * np.pi * 440 * np.arange(seconds * 44_100) / 44_100)
    soundfile.write(path, np.stack([0.6 * wave, 0.2 * wave], 1), 44_100)
    return path


def attach(page: Any, button: str, *files: Path) -> None:
    """Choose files, and wait until they are read."""
    with page.expect_file_chooser() as chosen:
        page.get_by_role("button", name=button, exact=True).click()
    chosen.value.set_files(files)
    page.wait_for_selector("#attached li button")
    page.wait_for_selector("#send:enabled")


def bodies(page: Any) -> list[Any]:
    """What the page will have sent, as it comes."""
    sent: list[Any] = []
    page.on("request", lambda each: each.method == "POST" and sent.append(each.post_data_json))
    return sent


def hand_over(page: Any, event: str, name: str, kind: str, data: bytes) -> None:
    """Paste a file, or drop it."""
    page.evaluate(
        """([event, name, type, bytes]) => {
          const transfer = new DataTransfer();
          transfer.items.add(new File([new Uint8Array(bytes)], name, { type }));
          const given = { bubbles: true, cancelable: true };
          const make = {
            paste: () => new ClipboardEvent("paste", { ...given, clipboardData: transfer }),
            drop: () => new DragEvent("drop", { ...given, dataTransfer: transfer }),
          };
          document.querySelector("#composer").dispatchEvent(make[event]());
        }""",
        [event, name, kind, [*data]],
    )


def decoded(url: str) -> bytes:
    return base64.b64decode(url.partition(",")[2] or url)


def test_pictures_go_along_with_a_prompt_and_all_later_ones(
    opened: Opened, pictured: str, tmp_path: Path
) -> None:
    page = opened(pictured)
    sent = bodies(page)
    red, blue = picture(tmp_path, "red"), picture(tmp_path, "blue")
    page.wait_for_selector("#send:enabled")
    attach(page, "Attach images", red, blue)
    page.click("button[aria-label='Remove: blue.png']")
    send(page, "What is it?")
    text = made(finished(page))
    assert page.locator("#attached li").count() == 0
    url = f"data:image/png;base64,{base64.b64encode(red.read_bytes()).decode()}"
    (asked,) = sent[0]["messages"]
    assert asked["content"] == [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is it?"},
    ]
    body = {name: value for name, value in sent[0].items() if not name.startswith("stream")}
    reply = httpx2.post(f"{pictured}/v1/chat/completions", json=body, timeout=60).json()
    assert text == reply["choices"][0]["message"]["content"] != ""
    shown = page.get_by_role("img", name="red.png")
    assert shown.evaluate("e => e.naturalWidth") == 40  # the policy of the page lets it in

    send(page, "And now?")
    page.wait_for_selector(".turn >> nth=1")
    finished(page)
    assert sent[1]["messages"][0] == asked and sent[1]["messages"][2]["content"] == "And now?"


@pytest.mark.parametrize("event", ["paste", "drop"])
def test_a_picture_alone_is_a_prompt(
    opened: Opened, pictured: str, tmp_path: Path, event: str
) -> None:
    page = opened(pictured)
    sent = bodies(page)
    page.wait_for_selector("#send:enabled")
    hand_over(page, event, "red.png", "image/png", picture(tmp_path, "red").read_bytes())
    page.wait_for_selector("#attached img")
    send(page, "")
    finished(page)
    assert [part["type"] for part in sent[0]["messages"][0]["content"]] == ["image_url"]
    assert page.inner_text("#list .title span") == "red.png"


def test_a_large_picture_is_made_smaller(opened: Opened, pictured: str, tmp_path: Path) -> None:
    page = opened(pictured)
    sent = bodies(page)
    page.wait_for_selector("#send:enabled")
    attach(page, "Attach images", picture(tmp_path, "teal", (3000, 2000)))
    send(page, "What is it?")
    finished(page)
    url = sent[0]["messages"][0]["content"][0]["image_url"]["url"]
    assert url.startswith("data:image/jpeg")
    image = Image.open(io.BytesIO(decoded(url)))
    assert image.size == (1568, 1045)
    assert np.abs(np.subtract(image.getpixel((9, 9)), (0, 128, 128))).max() <= 2


def test_what_is_no_picture_is_said_beside_the_prompt(opened: Opened, pictured: str) -> None:
    page = opened(pictured)
    page.wait_for_selector("#send:enabled")
    for name, kind, problem in (
        ("a.txt", "text/plain", "a.txt is not an image."),
        ("a.png", "image/png", "a.png cannot be decoded as an image"),
    ):
        hand_over(page, "drop", name, kind, b"none")
        page.wait_for_selector(f"#unread:has-text('{problem}')")
    assert page.locator("#attached li").count() == 0
    assert not page.get_by_role("button", name="Record").is_visible()


def test_models_that_read_text_only_are_offered_nothing(opened: Opened, tmp_path: Path) -> None:
    page = opened()
    page.wait_for_selector("#send:enabled")
    assert not page.locator("#composer [data-kind]:visible").count()
    hand_over(page, "paste", "red.png", "image/png", picture(tmp_path, "red").read_bytes())
    assert page.inner_text("#unread") == "" and not page.locator("#attached li").count()


def test_chats_take_sounds(opened: Opened, url: str, tmp_path: Path) -> None:
    """A small file as it is; a large one, and the microphone, as models of speech hear them."""
    page = opened("about:blank")
    sent = bodies(page)

    def told(route: Any) -> None:
        route.fulfill(json=route.fetch().json() | {"media": ["audio"]})

    page.route("**/v1/speculation*", told)
    page.goto(url)
    page.wait_for_selector("#send:enabled")
    small, large = tone(tmp_path / "small.flac", 1), tone(tmp_path / "large.wav", 4)
    attach(page, "Attach audio", small, large)
    page.get_by_role("button", name="Record", exact=True).click()
    page.click("[title='Stop recording']", delay=300)
    page.wait_for_selector("#attached li:nth-child(3) audio")
    replied(page, ("Yes", {"content": "Yes"}))
    *sounds, text = sent[0]["messages"][0]["content"]
    assert text == {"type": "text", "text": "Hello"}
    assert [each["type"] for each in sounds] == ["input_audio"] * 3
    files = [decoded(each["input_audio"]["data"]) for each in sounds]
    assert files[0] == small.read_bytes()
    for file in files[1:]:
        facts = soundfile.info(io.BytesIO(file))
        assert (facts.samplerate, facts.channels, facts.format) == (16_000, 1, "WAV")
        assert facts.subtype == "PCM_16" and facts.frames
    samples, _ = soundfile.read(io.BytesIO(files[1]))
    assert len(samples) == 64_000
    assert np.abs(np.fft.rfft(samples)).argmax() == 440 * 4
    assert np.abs(samples).max() == pytest.approx(0.4, abs=0.02)  # the mean of two channels
    assert page.locator(".turn audio").count() == 3


def test_speech_is_written_down(opened: Opened, spoken: str, tmp_path: Path) -> None:
    page = opened(spoken)
    page.wait_for_selector("#send:enabled")
    assert not page.is_visible("#prompt")
    page.click("#settings summary")
    assert not page.is_visible("[name=temperature]")
    page.fill("[name=language]", "en")
    sound = tone(tmp_path / "speech.wav", 1)
    attach(page, "Attach audio", tone(tmp_path / "other.wav", 1))
    attach(page, "Attach audio", sound)  # in its place
    page.click("#send")
    answer = finished(page)
    path, file = f"{spoken}/v1/audio/transcriptions", {"file": ("a.wav", sound.read_bytes())}
    reply = httpx2.post(path, data={"language": "en"}, files=file, timeout=60)
    assert answer.locator(".made").text_content().strip() == reply.json()["text"] != ""
    assert page.locator(".turn audio").get_attribute("aria-label") == "speech.wav"
    assert page.inner_text(".actions") == "Copy"

    page.fill("[name=language]", "none")
    attach(page, "Attach audio", sound)
    page.click("#send")
    page.wait_for_selector(".error p")
    assert "none" in page.inner_text(".error p")
    refused = page.locator(".turn").last.element_handle()
    page.click("text=Try again")
    page.wait_for_selector(".turn:last-child audio")  # the same sound
    page.wait_for_selector(".turn:last-child .error p")
    assert page.locator(".turn").count() == 2
    assert not refused.evaluate("turn => turn.isConnected")
