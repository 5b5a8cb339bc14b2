"""Rows of published benchmarks of speculative decoding. SPEED-Bench (nvidia/SPEED-Bench,
arXiv 2604.09557), Spec-Bench and MT-Bench publish one question per row, with a category and the
user's turns.

The format was read from SPEED-Bench's dataset card, and from the scripts that complete its prompts:
NeMo Skills' nemo_skills/dataset/speed-bench/prepare.py writes .jsonl files with `messages`, one
user message per turn; Model Optimizer's examples/specdec_bench writes .parquet files with `turns`.
The published files hold PLACEHOLDER instead of prompts that must not be copied.

Only the first turn is used, as in the benchmarks of vLLM and SGLang: later turns need the answers
of the model to the earlier ones.
"""

from __future__ import annotations

from typing import Any

from foretoken.errors import InputError, format_value
from foretoken.text.messages import Message, require_conversation

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


def is_question(row: dict[str, Any]) -> bool:
    """Return whether a row has the format of a benchmark's question."""
    return "question_id" in row or "turns" in row


def convert_question(row: dict[str, Any]) -> dict[str, Any]:
    """Return a question as a line of a prompt file: its id, its category, and the messages of its
    first turn. Other columns are ignored. Raises InputError if the prompt is missing or invalid."""
    line: dict[str, Any] = {"id": row.get("question_id"), "messages": _get_first_turn(row)}
    return line | ({"category": row["category"]} if "category" in row else {})


def _get_first_turn(row: dict[str, Any]) -> list[Message]:
    """Return the messages of a question up to the user's first message."""
    turns, messages = row.get("turns"), row.get("messages")
    if turns is not None:
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
            raise InputError(f"turns is {format_value(turns)}; give a list of strings")
        messages = list[Message]([{"role": "user", "content": turns[0]}])
    if messages is None:
        raise InputError("the question has no turns and no messages; give the user's turns")
    require_conversation(messages)
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise InputError("the question has no message of the user; give the user's turns")
    first = messages[: roles.index("user") + 1]
    if str(first[-1]["content"]).startswith(PLACEHOLDER):
        raise InputError(
            "the prompt is missing, because its source forbids copies; complete the file with "
            "SPEED-Bench's prepare.py"
        )
    return first
