"""Pictures and sounds that clients send are decoded in a process of their own: a small file may
unfold to all memory, and one that breaks a library must not take the engine with it.

`python -m foretoken.server.process.media_sandbox` is that process: it imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foretoken.errors import InputError
from foretoken.media.pictures import picture
from foretoken.media.sounds import sound
from foretoken.server.process import sandbox

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class MediaSandbox:
    """A process that decodes; it starts with the first picture or sound.

    Args:
        pixels: The most that a picture may have.
        seconds: The longest that a sound may last.
    """

    def __init__(self, pixels: int, seconds: float) -> None:
        self._limits = {"pixels": pixels, "seconds": seconds}
        self._sandbox = sandbox.Sandbox(__name__, lambda: {})
        self.close = self._sandbox.close

    def picture(self, file: bytes, place: str) -> NDArray[np.uint8]:
        """Return a picture's pixels `[H, W, 3]`; `place`: where it stands, for errors."""
        return self._decoded("uint8", file, kind="picture", place=place)

    def sound(self, file: bytes, rate: int, place: str) -> NDArray[np.float32]:
        """Return a sound's samples `[n]` at `rate` Hz; `place`: where it stands, for errors."""
        return self._decoded("float32", file, kind="sound", place=place, rate=rate)

    def _decoded(self, dtype: str, file: bytes, **question: Any) -> NDArray[Any]:
        import numpy as np  # late: the HTTP process does without

        answer = self._sandbox.ask(question | self._limits, file)
        if answer is None:
            raise InputError(
                f"{question['place']} takes more than {sandbox.SECONDS:g} s or "
                f"{sandbox.BYTES // 2**30} GB to decode; send a smaller file"
            )
        told, values = answer
        if "problem" in told:
            raise InputError(told["problem"])
        return np.frombuffer(values, dtype).reshape(told["shape"])


def _start(_: dict[str, Any]) -> Any:
    import numpy as np

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
