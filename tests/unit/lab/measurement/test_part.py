"""The file of a measurement under way: prompts in order, what was cut off dropped."""

from __future__ import annotations

from dataclasses import replace

from foretoken.lab.measurement.part import Part
from foretoken.lab.measurement.result import Measurement, parse
from measurements import document


def test_prompts_are_found_again(tmp_path):
    done = parse(document([0.5], 0.1), Measurement, "by hand")
    (one,), out = done.prompts, tmp_path / "m.json"
    part = Part(out, done.options, done.machine)
    assert part.done == [] and part.path.name == "m.json.part.jsonl"
    part.add(one)
    part.add(replace(one, context=7))
    again = Part(out, done.options, done.machine)
    assert again.done == [one, replace(one, context=7)]
    with again.path.open("a") as file:
        file.write('{"prompt_tokens": 1, "overl')  # killed while it was written
    assert Part(out, done.options, done.machine).done == again.done
    assert len(part.path.read_text().splitlines()) == 3


def test_other_options_or_another_machine_start_afresh(tmp_path):
    done = parse(document([0.5], 0.1), Measurement, "by hand")
    out = tmp_path / "m.json"
    Part(out, done.options, done.machine).add(done.prompts[0])
    assert Part(out, done.options, replace(done.machine, cores=9)).done == []
    Part(out, done.options, done.machine).add(done.prompts[0])
    other = Part(out, replace(done.options, seed=1), done.machine)
    assert other.done == [] and len(other.path.read_text().splitlines()) == 1
    other.remove()
    assert list(tmp_path.iterdir()) == []
