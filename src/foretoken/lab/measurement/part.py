"""A measurement under way: a line for every prompt measured, beside the file to be written.

After a kill the same options resume it; other options, another machine or another version of the
package start afresh.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from foretoken.errors import InputError
from foretoken.lab.machine import Machine
from foretoken.lab.measurement.result import VERSION, Observed, Options, parse
from foretoken.storage import files


class Part:
    """The file `<out>.part.jsonl`: a head, then the prompts in order; `done`: those measured."""

    def __init__(self, out: Path, options: Options, machine: Machine) -> None:
        self.path = out.with_name(out.name + ".part.jsonl")
        head = {"version": VERSION, "options": asdict(options), "machine": asdict(machine)}
        self.head = json.dumps(head)
        self.done = self._read()
        lines = [self.head, *(json.dumps(asdict(one)) for one in self.done)]
        files.write(self.path, "".join(f"{line}\n" for line in lines).encode())

    def add(self, observed: Observed) -> None:
        """The next prompt was measured."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(observed)) + "\n")

    def remove(self) -> None:
        """The measurement was saved."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> list[Observed]:
        """The usable lines; a last line that was cut off is dropped."""
        try:
            head, *lines = self.path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            return []
        observed: list[Observed] = []
        for line in lines if head == self.head else []:
            try:
                observed.append(parse(files.parse_json(line), Observed, str(self.path)))
            except (ValueError, InputError):
                break
        return observed
