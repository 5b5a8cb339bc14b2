"""Requests that Open WebUI and Continue send, written after their public sources and replayed."""

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

URL, MODEL = os.environ["FORETOKEN_URL"], os.environ["FORETOKEN_MODEL"]


def replay(path: str, body: dict[str, Any]) -> list[Any]:
    """The events of the answer, or the answer alone."""
    request = urllib.request.Request(
        f"{URL}/v1/{path}",
        json.dumps({"model": MODEL, **body}).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer none", "api-key": "none"},
    )
    with urllib.request.urlopen(request) as answer:
        text = answer.read().decode()
    if not body["stream"]:
        return [json.loads(text)]
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert path == "responses" or events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


clients = []
for file in sorted((Path(__file__).parent / "bodies").glob("*.json")):
    recorded = json.loads(file.read_text())
    for each in recorded:
        events = replay(each["path"], each["body"])
        if each["path"] == "responses":
            status = events[-1]["response"]["status"]
            assert status in ("completed", "incomplete"), (file.name, each["why"])
            continue
        reasons = [c["finish_reason"] for event in events for c in event["choices"]]
        assert reasons[-1] in ("stop", "length", "tool_calls"), (file.name, each["why"])
        assert "stream_options" not in each["body"] or events[-1]["usage"], each["why"]
    clients.append(f"{file.stem} ({len(recorded)})")
print(f"recorded requests: {', '.join(clients)}")
