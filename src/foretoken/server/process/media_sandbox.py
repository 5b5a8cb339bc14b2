"""Images and audio of clients are decoded in a process of their own: a small file may unfold to all
memory, and one that breaks a library must not take the engine with it.

`python -m foretoken.server.process.media_sandbox` is that process: it imports no torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken.errors import InputError
from foretoken.media.pictures import picture
from foretoken.media.sounds import sound
from foretoken.server.process import sandbox


class MediaSandbox:
    """A process that decodes images of `pixels` and audio of `seconds` at most; it starts with the
    first."""

    def __init__(self, pixels: int, seconds: float) -> None:
        self._limits = {"pixels": pixels, "seconds": seconds}
        self._sandbox = sandbox.Sandbox(__name__, "decode", "send a smaller file")
        self.close = self._sandbox.close

    def picture(self, file: bytes, place: str) -> NDArray[np.uint8]:
        """Return an image's pixels `[H, W, 3]`; `place`: its place in the request, for errors."""
        return self._decode("uint8", file, kind="picture", place=place)

    def sound(self, file: bytes, rate: int, place: str) -> NDArray[np.float32]:
        """Return samples `[n]` of audio at `rate` Hz; `place`: as of `picture`."""
        return self._decode("float32", file, kind="sound", place=place, rate=rate)

    def _decode(self, dtype: str, file: bytes, **question: Any) -> NDArray[Any]:
        fields, values = self._sandbox.ask(question["place"], question | self._limits, file)
        if "problem" in fields:
            raise InputError(fields["problem"])
        return np.frombuffer(values, dtype).reshape(fields["shape"])


def _start(_: dict[str, Any]) -> Any:
    def decoded(question: dict[str, Any], file: bytearray) -> sandbox.Message:
        place = question["place"]
        try:
            if question["kind"] == "picture":
                values = np.asarray(picture(bytes(file), place, question["pixels"]))
            else:
                values = sound(bytes(file), question["rate"], place, question["seconds"])
        except InputError as error:
            return {"problem": str(error)}, b""
        return {"shape": values.shape}, values.tobytes()

    return decoded


if __name__ == "__main__":
    sandbox.answer(_start)
