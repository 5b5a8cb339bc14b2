"""The one OpenVINO core of this process.

A core's CPU plugin takes the thread's alternate signal stack for its own. Where there were two and
the older ended first, the younger's end would put the freed stack of the older back, and the next
signal, such as Ctrl-C, would crash the process.
"""

from __future__ import annotations

from functools import cache

import openvino as ov


@cache
def core() -> ov.Core:
    """Made when first asked for, kept until the process ends."""
    return ov.Core()
