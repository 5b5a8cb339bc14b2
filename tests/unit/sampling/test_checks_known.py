"""Each kind of check of a sampling option is known wherever options are derived from it."""

from __future__ import annotations

import pytest

from foretoken.cli import option as command_line
from foretoken.sampling import checks
from foretoken.sampling.params import ID_EXTRACTORS, SAMPLING_OPTIONS
from foretoken.server.api import protocol

NAMING_IDS = {checks.as_id, checks.as_ids, checks.as_sequences, checks.as_biases}


@pytest.mark.parametrize("name", SAMPLING_OPTIONS)
def test_a_check_is_known(name: str) -> None:
    option = SAMPLING_OPTIONS[name]
    check = option.check
    if option.panel and name != "structured":  # whose flags are the grammars'
        assert {check, type(check)} & {*command_line.OPTION_TYPES, *command_line.OPTION_PARSERS}
    if option.api:
        assert {check, type(check)} & {*protocol.FIELD_TYPES}
    assert check not in NAMING_IDS or check in ID_EXTRACTORS
