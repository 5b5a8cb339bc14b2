"""Results stored on disk are named by a format number: code that changes them must raise it."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

import pytest

import foretoken
from foretoken.models.native.conversion import CONVERSION_FORMAT
from foretoken.models.stock.check_results import CHECK_FORMAT

SOURCE = Path(foretoken.__file__).parent
STOCK = ("models/*.py", "models/stock/*.py")
READERS = "network_reader encoder_decoder_reader experts latents position_tables recurrences"
WRITERS = "conversion description network packing"
NATIVE = (*STOCK, *(f"models/native/{name}.py" for name in f"{READERS} {WRITERS}".split()))
CHECK = (
    *STOCK,
    "models/graphs.py",
    "kernels/library.py",
    "models/native/*.py",
)

# The files that make each kind of result, and the digest of their code at its format number
FORMATS = {
    f"FORMAT={CONVERSION_FORMAT} (models/native/conversion.py)": (NATIVE, "dd544b0b947a22ef"),
    f"CHECK_FORMAT={CHECK_FORMAT} (models/stock/check_results.py)": (CHECK, "a23d5907b036dd29"),
}


class Bare(ast.NodeTransformer):
    """Code without imports and docstrings, which change no result."""

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node


def digest(folder: Path, patterns: tuple[str, ...]) -> str:
    """A digest of the code in these files, whatever their comments, docstrings and imports."""
    files_of = {pattern: [*folder.glob(pattern)] for pattern in patterns}
    assert all(files_of.values()), files_of
    files = sorted({file for files in files_of.values() for file in files})
    code = [ast.unparse(Bare().visit(ast.parse(file.read_text()))) for file in files]
    return hashlib.sha256("\n".join(sorted(code)).encode()).hexdigest()[:16]


@pytest.mark.parametrize("number", FORMATS)
def test_the_format_number_is_raised_with_the_code(number: str) -> None:
    patterns, known = FORMATS[number]
    now = digest(SOURCE, patterns)
    assert now == known, (
        f"code changed that makes results stored on disk. If results of the same input may differ "
        f"now, raise {number}: stored ones are then made again. In both cases write the new digest "
        f"{now} into FORMATS of this test."
    )


def test_a_digest_is_of_code_alone(tmp_path: Path) -> None:
    file = tmp_path / "a.py"

    def of(text: str) -> str:
        file.write_text(text)
        return digest(tmp_path, ("*.py",))

    before = of("x = 1\n")
    assert of('"""Says."""\nimport os\n\nx = 1  # one\n') == before
    assert of("x = 2\n") != before
