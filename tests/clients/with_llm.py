"""`llm`, its models of extra-openai-models.yaml: chats, completions, schemas, tools."""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from weather import ASK, MODEL, URL, Weather

home = Path(tempfile.mkdtemp())
os.environ["LLM_USER_PATH"] = str(home)
entry = f'  model_name: {MODEL}\n  api_base: "{URL}/v1"\n'
chat = f"- model_id: served\n{entry}  supports_tools: true\n  supports_schema: true\n"
(home / "extra-openai-models.yaml").write_text(
    f"{chat}- model_id: texts\n{entry}  completion: true\n"
)


def run(*arguments: str) -> str:
    command = [str(Path(sys.executable).parent / "llm"), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


for name in ("served", "texts"):
    for more in ([], ["--no-stream"]):
        run("-m", name, ASK, "-o", "max_tokens", "20", "--key", "none", *more)
schema = json.dumps(Weather.model_json_schema())
Weather.model_validate_json(run("-m", "served", ASK, "--schema", schema, "--key", "none"))

import llm  # noqa: E402  (after the place of its files is told)


def now() -> str:
    """Tell the time."""
    return "noon"


model = llm.get_model("served")
with suppress(ValueError):  # a small model may call for ever
    options = {"max_tokens": 50}
    model.conversation().chain(ASK, tools=[now], key="none", options=options, chain_limit=3).text()
called = llm.ToolCall(name="now", arguments={}, tool_call_id="call-1")
result = llm.ToolResult(name="now", output=now(), tool_call_id="call-1")
first = model.prompt(ASK, tools=[now], key="none", max_tokens=20)
first.text()
conversation = llm.Conversation(model, responses=[first])
first.add_tool_call(called)
answer = conversation.prompt("", tools=[now], tool_results=[result], key="none", max_tokens=20)
assert isinstance(answer.text(), str)
print(f"llm {version('llm')}: chats, completions, schemas, tools and what they gave")
