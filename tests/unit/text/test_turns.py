"""The tokens with which chat templates end turns."""

from __future__ import annotations

import pytest

from foretoken.text.templates import find_turn_end_ids, find_turn_end_tokens, get_special_ids
from tiny import byte_level

LOOP = "{% for m in messages %}"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + OPEN
PHI = LOOP + "<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}{{ eos_token }}"
PARTS = LOOP + "{{ m.content[0]['text'] }}<|im_end|>{% endfor %}"
NEXT_ONLY = LOOP + "<|{{ m.role }}|>{{ m.content }}{% endfor %}"
HARMONY = (
    LOOP + "<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
)
CLOSED = LOOP + "<|turn|>{{ m.content }}<|closed|><|END_OF_TURN_TOKEN|>{% endfor %}"
FAILS = "{{ raise_exception('no') }}"
WORDS = "<|im_start|> <|im_end|> <|end|> <|user|> <|assistant|> <|start|> <|return|> <|turn|>"
WORDS += " <|closed|> <|END_OF_TURN_TOKEN|>"


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, ["<|im_end|>"]),
        (PHI, ["<|end|>"]),
        (PARTS, ["<|im_end|>"]),
        (NEXT_ONLY, []),
        (HARMONY, []),
        (CLOSED, ["<|closed|>", "<|END_OF_TURN_TOKEN|>"]),
        (FAILS, []),
        ("a template without messages", []),
        ({"default": CHATML, "tool_use": PHI}, ["<|im_end|>"]),
        ({"tool_use": PHI}, []),
        (None, []),
    ],
)
def test_what_stands_behind_a_reply_whatever_follows(template, ends):
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": WORDS.split()})
    tokenizer.chat_template = template
    assert find_turn_end_tokens(tokenizer) == ends


def test_a_word_of_several_tokens_ends_nothing():
    tokenizer = byte_level()
    tokenizer.chat_template = CHATML
    assert find_turn_end_tokens(tokenizer) == []


def test_names_that_end_turns_in_every_vocabulary():
    ids = {"<|im_end|>": 5, "<|end|>": 7, "<|im_start|>": 6}
    assert find_turn_end_ids(ids) == {5, 7}
    for parts in ({"<|return|>": 8, "<|call|>": 9}, {"<|flush|>": 8, "<|calls|>": 9}):
        assert find_turn_end_ids(ids | parts) == {5, 8, 9}  # <|end|> is within a turn there


def test_special_tokens_by_name():
    tokenizer = byte_level()
    tokenizer.add_tokens(["<|plain|>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    assert get_special_ids(tokenizer) == {"<|endoftext|>": 0, "<|im_end|>": 321}
