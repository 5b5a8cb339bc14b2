"""The kernels under the compiler's sanitizers: no byte is read or written outside of what is there,
nothing is undefined, and no thread reads what another is writing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from foretoken.kernels import build

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
pytestmark = [pytest.mark.cpu_only, pytest.mark.prove]
FAMILIES = ("Llama", "Mistral", "Gemma 2", "Gemma 3", "GPT-NeoX")
HYBRIDS = ("Qwen3_5ForCausalLM", "GraniteMoeHybridForCausalLM", "Lfm2ForCausalLM")
HYBRIDS += ("FalconH1ForCausalLM",)
FLAGS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
PASSES = """
import os, sys
from pathlib import Path
import blocks, hybrids, tiny, torch, transformers
from tiny_families import FAMILIES
from foretoken.kernels import library
from foretoken.models.base import TokenChoice
from foretoken.models.native.conversion import NativeConversion

library.LIBRARY_FILE = Path(sys.argv[1])
tokens = [(7 * i * i + 3 * i) % 59 + 2 for i in range(400)]
sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "word_embed_proj_dim": 64}
long = {"max_position_embeddings": 512, "vocab_size": 61}

def built(name, more, dtype):
    torch.manual_seed(0)
    if name in hybrids.SMALL:
        return hybrids.random(name, 0, 61).float()
    config, model, settings = FAMILIES[name]
    settings = settings | {key: size for key, size in sizes.items() if key in settings} | long
    settings |= {"hidden_size": 64} | more
    network = getattr(transformers, model)(getattr(transformers, config)(**settings)).eval()
    return network.bfloat16().float() if dtype == "bfloat16" else network  # stored in 16 bits

odd = {"hidden_size": 72, "head_dim": 48, "intermediate_size": 100, "num_attention_heads": 3}
networks = [("Llama", odd | {"num_key_value_heads": 1}), *((name, {}) for name in sys.argv[2:])]
ran = 0
for name, more in networks:
    for dtype in ("float32", "bfloat16", "int8", "int4"):
        made = NativeConversion(None, dtype, lambda: built(name, more, dtype)).load_model()
        results = []
        for instructions in library.list_instruction_sets():
            os.environ[library.INSTRUCTIONS_VARIABLE] = instructions
            for threads in (1, 2, 3):
                made.passes.threads, made.passes._opened = threads, None
                made.permute([])
                made.start([tokens[:380], tokens[:7], []])  # a prompt in chunks, a short one
                mixed = [tokens[:1], tokens[1:6], tokens[2:15]]  # ragged rows
                one = made.score(mixed, [1, 3, 13])
                made.set_lengths([377, 9, 1])
                filters = 0.8, 20, 0.9, 0.01
                numbers = torch.full((3, 3), 0.4, dtype=torch.float64)
                choice = TokenChoice(made.vocab_size, None, [filters] * 3, numbers)
                draft = made.chain([[5], [6, 7], [8]], [3, 1, 2], choice)
                made.set_lengths([377, 9, 1])
                made.permute([0])
                two = made.score([tokens[:2]], [2])  # a context divided between threads
                drawn = draft.tokens.tolist(), draft.q[1, 0].numpy().tobytes()
                results.append((one.numpy().tobytes(), two.numpy().tobytes(), str(drawn)))
                ran += 1
        assert len(set(results)) == 1, f"{name} in {dtype} differs"
for dtype in ("float32", "bfloat16", "int8", "int4"):
    results = []
    for instructions in library.list_instruction_sets():
        os.environ[library.INSTRUCTIONS_VARIABLE] = instructions
        for threads in (1, 2, 3):
            made = blocks.native_draft(blocks.DFLASH2, tiny.llama(40, seed=5), dtype)
            made.passes.threads = made.context_kv.threads = threads
            made.start(2)
            made.append_context([torch.ones(20, 32), torch.ones(3, 32)])
            results.append(made.predict_block([5, 6], [4, 2])[1][0].numpy().tobytes())
            ran += 1
    assert len(set(results)) == 1, f"blocks in {dtype} differ"
print(ran, "ran")
"""
TEAM = """
#include "team.h"

#include <pthread.h>

enum { COUNT = 500, ROUNDS = 60 };
struct Job {
  int size, numbers[COUNT], others[COUNT];
};

void work(void* what, Team& team, int me) {
  Job& job = *(Job*)what;
  for (int round = 0; round < ROUNDS; round++) {
    for (int first, last; team.take(me, COUNT, 7, &first, &last);)
      for (int i = first; i < last; i++) job.numbers[i] += 1 + job.others[i];
    team.meet();
    for (int first, last; team.take(me, COUNT, 3, &first, &last);)
      for (int i = first; i < last; i++) job.others[i] = job.numbers[COUNT - 1 - i] % 3;
    team.meet();
  }
}

void* caller(void* what) {
  for (int i = 0; i < 20; i++) {
    Job job = {}, alone = {};
    job.size = 1 + (i + *(int*)what) % 4;
    if (!run_in_team(job.size, work, &job) || !run_in_team(1, work, &alone)) return what;
    for (int k = 0; k < COUNT; k++)
      if (job.numbers[k] != alone.numbers[k]) return what;
  }
  return nullptr;
}

int main() {
  int numbers[2] = {0, 1};
  pthread_t threads[2];
  void* wrong[2];
  for (int i = 0; i < 2; i++) pthread_create(&threads[i], nullptr, caller, &numbers[i]);
  for (int i = 0; i < 2; i++) pthread_join(threads[i], &wrong[i]);
  return wrong[0] || wrong[1];
}
"""


def sanitizer(name: str) -> str:
    """The path of a sanitizer's library; skips where the compiler has none."""
    try:
        command = [*build.find_compiler(), f"-print-file-name={name}"]
    except build.BuildError as error:
        pytest.skip(str(error))
    found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"the compiler has no {name}")
    return found


@pytest.fixture(scope="module")
def instrumented(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sanitizer("libasan.so")
    file = tmp_path_factory.mktemp("sanitized") / "kernels.so"
    build.build(file, FLAGS)
    return file


def run(file: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    # C++'s own library, too: exceptions of others pass through the sanitizer
    preload = " ".join(map(sanitizer, ("libasan.so", "libstdc++.so")))
    own = {"LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0", "FORETOKEN_KERNELS": str(file)}
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests")))
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | own | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )


def require_clean(ended: subprocess.CompletedProcess[str], last: str) -> None:
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-6000:]
    assert last in ended.stdout.splitlines()[-1], ended.stdout[-2000:]


def test_kernels_stay_in_their_bounds(instrumented: Path) -> None:
    tests = HERE / "test_arithmetic.py", HERE / "test_tokens.py"
    ended = run(instrumented, "-m", "pytest", "-q", "-x", "-p", "no:xdist", *tests)
    require_clean(ended, "passed")


def test_passes_stay_in_their_bounds(instrumented: Path) -> None:
    ended = run(instrumented, "-c", PASSES, instrumented, *FAMILIES, *HYBRIDS)
    require_clean(ended, "ran")


def test_threads_of_a_team_never_race(tmp_path: Path) -> None:
    sanitizer("libtsan.so")
    source, program = tmp_path / "team.cpp", tmp_path / "team"
    source.write_text(TEAM)
    more = ["-g", "-fsanitize=thread", f"-I{build.CPP_FOLDER}"]
    files: Sequence[object] = (source, build.CPP_FOLDER / "team.cpp", "-o", program)
    subprocess.run(
        [*build.find_compiler(), *build.COMPILER_FLAGS, *more, *map(str, files)], check=True
    )
    ended = subprocess.run([str(program)], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
