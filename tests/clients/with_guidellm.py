"""GuideLLM's benchmark over each endpoint, with the texts that it makes."""

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

URL, MODEL = os.environ["FORETOKEN_URL"], os.environ["FORETOKEN_MODEL"]
TOKENIZER = os.environ["FORETOKEN_TOKENIZER"]
folder = Path(tempfile.mkdtemp())
for path in ("completions", "chat/completions", "responses"):
    where = f"kind=openai_http,target={URL},model={MODEL},request_format=/v1/{path}"
    report = folder / "report.json"
    command = [str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console"]
    command += ["--backend", where, "--profile", "kind=synchronous"]
    command += ["--constraint", "kind=max_requests,count=3"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"]
    subprocess.run([*command, "--output", f"kind=json,path={report}"], check=True, cwd=folder)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == 3 and not requests["errored"], path
    for each in requests["successful"]:
        assert each["output_metrics"]["text_tokens"] == 8, (path, each["output_metrics"])
print(f"guidellm {version('guidellm')}: completions, chats, responses")
