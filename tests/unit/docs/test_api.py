"""docs/api.md has every public name, once, and no other."""

from __future__ import annotations

import re

import foretoken
from scripts import ROOT


def test_every_public_name_is_on_the_page():
    named = re.findall(r"^::: foretoken\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    assert sorted(named) == foretoken.__all__
