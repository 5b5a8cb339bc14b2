"""What `foretoken generate` says of its texts, from completions made by hand."""

from __future__ import annotations

from types import SimpleNamespace

from foretoken.cli.answer import cut, departure, show
from foretoken.cli.prompts import Line


def completion(count: int = 4, reason: str = "length", bias: float = 0.0, drafted: int = 0):
    stats = SimpleNamespace(bias=bias, drafted=drafted)
    return SimpleNamespace(tokens=[7] * count, text=None, finish_reason=reason, stats=stats)


def test_texts_that_the_context_ended():
    one, two = Line("a"), Line("b")
    assert cut([one], [completion(4)], 4) == ""
    assert cut([one], [completion(3, "eos")], 4) == ""
    assert cut([one], [completion(3)], 4).endswith("after 3 new tokens of 4 asked for")
    assert cut([one, two], [completion(4), completion(3)], 4).endswith("asked for: prompt 1")
    many = cut([one] * 10, [completion(1)] * 10, 4)
    assert many.startswith("10 of 10 texts end") and many.endswith(
        "prompt 0, 1, 2, 3, 4, 5, 6, 7, ..."
    )


def test_a_text_without_bias_or_guesses_is_the_target_s():
    greedy = departure([completion(drafted=5)], 0.5, greedy=True)
    assert (
        greedy == "lenience 0.5: still the target's greedy text: all 4 tokens are its first choice."
    )
    assert departure([completion()], 0.5, greedy=False).endswith("law: nothing was guessed.")


def test_bias_is_a_mean_over_all_tokens():
    done = [completion(3, bias=0.2, drafted=2), completion(1)]
    assert "law that is 0.1500 away (total variation, mean of 4 tokens)" in departure(
        done, 0.5, greedy=False
    )
    assert "2 times it" in departure(done, 0.5, greedy=False)
    assert "1 of 4 tokens are not its first choice" in departure(done, 0.5, greedy=True)


def test_several_texts_have_headings(capsys):
    lines = [Line("a\nb", id="x"), Line([1, 2])]
    show(SimpleNamespace(), lines, [completion(2), completion(1)], steps=False)
    assert capsys.readouterr().out == "==> prompt 0 (x): a b <==\n7,7\n\n==> prompt 1: 1,2 <==\n7\n"
    show(SimpleNamespace(), lines[:1], [completion(2)], steps=False)
    assert capsys.readouterr().out == "7,7\n"
