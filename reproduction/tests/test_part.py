"""The file of a measurement under way: prompts in order, what was cut off dropped."""

from __future__ import annotations

from dataclasses import replace

from measurements import document

from reproduction.measurement import Measurement, PartialMeasurement, parse


def test_prompts_are_found_again(tmp_path):
    measurement = parse(document([0.5], 0.1), Measurement, "by hand")
    (one,), out = measurement.prompts, tmp_path / "m.json"
    part = PartialMeasurement(out, measurement.options, measurement.machine)
    assert part.done == [] and part.path.name == "m.json.part.jsonl"
    part.add(one)
    part.add(replace(one, context=7))
    again = PartialMeasurement(out, measurement.options, measurement.machine)
    assert again.done == [one, replace(one, context=7)]
    with again.path.open("a") as file:
        file.write('{"prompt_tokens": 1, "overl')  # killed while it was written
    assert PartialMeasurement(out, measurement.options, measurement.machine).done == again.done
    assert len(part.path.read_text().splitlines()) == 3


def test_other_options_or_another_machine_start_afresh(tmp_path):
    measurement = parse(document([0.5], 0.1), Measurement, "by hand")
    out = tmp_path / "m.json"
    PartialMeasurement(out, measurement.options, measurement.machine).add(measurement.prompts[0])
    assert (
        PartialMeasurement(out, measurement.options, replace(measurement.machine, cores=9)).done
        == []
    )
    PartialMeasurement(out, measurement.options, measurement.machine).add(measurement.prompts[0])
    other = PartialMeasurement(out, replace(measurement.options, seed=1), measurement.machine)
    assert other.done == [] and len(other.path.read_text().splitlines()) == 1
    other.remove()
    assert list(tmp_path.iterdir()) == []
