"""The evaluation harness: likelihoods and texts over completions, texts over chats."""

import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval

URL, MODEL = os.environ["FORETOKEN_URL"], os.environ["FORETOKEN_MODEL"]
folder = Path(tempfile.mkdtemp())
os.environ["HF_HOME"] = str(folder)
rows = folder / "rows.jsonl"
rows.write_text("".join(json.dumps({"q": f"Day {i}: Rome or"}) + "\n" for i in range(3)))
common: Any = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(rows)}},
    "test_split": "test",
    "doc_to_text": "{{q}}",
}
choice = {
    "task": "choice",
    "output_type": "multiple_choice",
    "doc_to_choice": ["Oslo", "Rome"],
    "doc_to_target": 0,
    "metric_list": [{"metric": "acc"}],
}
rolling = {
    "task": "rolling",
    "output_type": "loglikelihood_rolling",
    "doc_to_target": "{{q}}",
    "metric_list": [{"metric": "word_perplexity"}],
}
text = {
    "task": "text",
    "output_type": "generate_until",
    "doc_to_target": "Oslo",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}


def evaluated(model: str, path: str, tasks: list[Any], **more: Any) -> Any:
    arguments = {
        "model": MODEL,
        "base_url": f"{URL}/v1/{path}",
        "max_retries": 1,
        "max_length": 500,
    }
    if model == "local-completions":
        arguments["tokenizer"] = os.environ["FORETOKEN_TOKENIZER"]
    given = lm_eval.simple_evaluate(
        model, arguments, [{**task, **common} for task in tasks], bootstrap_iters=0, **more
    )
    assert given is not None
    return given


given = evaluated("local-completions", "completions", [choice, rolling, text], batch_size=2)
likelihoods = [float(pair[0]) for row in given["samples"]["choice"] for (pair,) in row["resps"]]
assert len(likelihoods) == 6 and all(value < 0 for value in likelihoods)
assert given["results"]["rolling"]["word_perplexity,none"] > 1
chats = evaluated("local-chat-completions", "chat/completions", [text], apply_chat_template=True)
assert len(chats["samples"]["text"]) == 3
print(f"lm-eval {version('lm-eval')}: likelihoods, texts, chats")
