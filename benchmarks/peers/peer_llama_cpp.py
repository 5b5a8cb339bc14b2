"""llama.cpp's kernels under a loop of ours, for `race.py --vs llama.cpp`.

Its Python binding has no speculation with a draft model, so plain and speculative decoding are
driven here over its low-level calls; greedy only. By default its settings are its own: a cache of
float16, flash attention if it is faster. "same-precision" has a cache as precise as ours, and
"q4_0" the weights in blocks that its documentation names as the fastest on a CPU, since they are
repacked at loading. "lookup" has these blocks, and draft tokens by the binding's own look-up in the
prompt and text, at its defaults.

A model with states takes back tokens of its last pass only: enough for a target. Its draft guesses
in a copy of the row, and reads afterwards what was accepted.
"""

from __future__ import annotations

import ctypes
from typing import Any

import gguf_model
import llama_cpp as llama
import numpy as np
from answer import Clock, Refused, Request, Texts, serve
from converted import converted
from gguf import GGMLQuantizationType
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

CHUNK = 512  # tokens that are read at once
REPACKED = ("q4_0", "lookup")  # settings
# As precise as ours; what q8_0 and q4_0 matrices are multiplied with is q8_0, rounded on the way
CACHES = {
    "float32": ("float32", GGMLQuantizationType.F32),
    "bfloat16": ("bfloat16", GGMLQuantizationType.BF16),
    "int8": ("float32", GGMLQuantizationType.F32),
    "int4": ("float32", GGMLQuantizationType.F32),
}


class Model:
    """Weights, and one row whose length is the number of tokens in its cache; or its fork."""

    def __init__(self, source: str, dtype: str, threads: int, setting: str) -> None:
        if dtype not in CACHES:
            raise Refused(f"llama.cpp is run in {', '.join(CACHES)}, not {dtype}")
        kind = "q4_0" if setting in REPACKED else dtype
        place = converted(
            source, f"gguf-{kind}", lambda folder, to: gguf_model.write(folder, to / "gguf", kind)
        )
        settings = llama.llama_model_default_params()
        self.model = llama.llama_model_load_from_file(str(place / "gguf").encode(), settings)
        if not self.model:
            raise Refused(f"llama.cpp cannot read what was made of {source}")
        self.V = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.cache = CACHES[dtype][1] if setting == "same-precision" else None
        self.threads = threads
        self.batch = llama.llama_batch_init(CHUNK, 0, 1)
        self.states = llama.llama_model_is_hybrid(self.model)
        self.contexts: dict[int, Any] = {}  # by the states that are kept: they cost time
        self.context, self.room, self.length = None, 0, 0
        self.row, self.forked = 0, 0  # which of the two, and the length where they part

    def start(self, room: int, rewind: int = 0) -> None:
        """An empty row that can hold `room` tokens; `rewind` of a pass can be taken back."""
        if room > self.room:
            for context in self.contexts.values():
                llama.llama_free(context)
            self.contexts, self.room = {}, -(-room // 256) * 256
        rewind = rewind if self.states else 0
        if rewind not in self.contexts:
            self.contexts[rewind] = self._context(rewind)
        self.context = self.contexts[rewind]
        self.cut(0)

    def _context(self, rewind: int) -> Any:
        settings = llama.llama_context_default_params()
        settings.n_ctx = self.room
        settings.n_batch = settings.n_ubatch = CHUNK
        settings.n_threads = settings.n_threads_batch = self.threads
        if self.cache is not None:
            settings.type_k = settings.type_v = int(self.cache)
        if self.states:
            settings.n_rs_seq, settings.n_seq_max, settings.kv_unified = rewind, 2, True
        context = llama.llama_init_from_model(self.model, settings)
        if not context:
            raise Refused(f"llama.cpp can make no context of {self.room} tokens")
        if llama.llama_n_rs_seq(context) < rewind:
            raise Refused("llama.cpp takes back no tokens of this model; leave --gamma at 0")
        return context

    def fork(self) -> None:
        """Go on in a copy that the next `cut` drops, where single tokens are not taken back."""
        if self.states:
            llama.llama_memory_seq_cp(llama.llama_get_memory(self.context), 0, 1, -1, -1)
            self.row, self.forked = 1, self.length

    def cut(self, length: int) -> None:
        """Keep that many tokens at most."""
        memory = llama.llama_get_memory(self.context)
        if self.row:
            llama.llama_memory_seq_rm(memory, 1, -1, -1)
            self.row, self.length = 0, self.forked
        self.length = min(self.length, length)
        if not llama.llama_memory_seq_rm(memory, 0, self.length, -1):
            raise RuntimeError(f"llama.cpp cannot go back to {self.length} tokens")

    def read(self, tokens: list[int], need: int) -> list[int]:
        """Append tokens; the likeliest next one after each of the last `need`."""
        for i in range(0, len(tokens), CHUNK):
            part = tokens[i : i + CHUNK]
            outputs = max(0, need - (len(tokens) - i - len(part)))
            self._decode(part, min(outputs, len(part)))
        logits = llama.llama_get_logits(self.context)
        return np.ctypeslib.as_array(logits, shape=(need, self.V)).argmax(-1).tolist()

    def _decode(self, tokens: list[int], need: int) -> None:
        batch, last = self.batch, len(tokens) - need
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, self.length + i, i >= last
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, self.row
        if llama.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode failed at {self.length} tokens")
        self.length += len(tokens)


class Peer:
    """A target and, where there is one, its draft."""

    def __init__(self, request: Request) -> None:
        how = request["threads"], request["setting"]
        self.target = Model(request["target"], request["dtype"], *how)
        self.draft = request["draft"] and Model(request["draft"], request["draft_dtype"], *how)
        self.lookup = LlamaPromptLookupDecoding() if request["setting"] == "lookup" else None

    def generate(self, request: Request) -> Texts:
        """Greedy decoding with gamma draft tokens a step; 0 is plain, but for look-up."""
        if request["temperature"]:
            raise Refused("llama.cpp is run greedily only; leave --temperature at 0")
        (prompt,), gamma, clock = request["prompts"], request["gamma"], Clock()
        text = list(prompt)
        full = len(text) + request["max_new_tokens"]
        gamma = self.lookup.num_pred_tokens if self.lookup else gamma
        self.target.start(full, gamma)
        if gamma and not self.lookup:
            self.draft.start(full)
        text += self.target.read(text, 1)
        clock.tick(1)
        while len(text) < full:
            draft_tokens = self._guess(text, min(gamma, full - len(text) - 1))
            best = self.target.read([text[-1], *draft_tokens], len(draft_tokens) + 1)
            n = next((i for i, x in enumerate(draft_tokens) if x != best[i]), len(draft_tokens))
            text += [*draft_tokens[:n], best[n]]
            self.target.cut(len(text) - 1)
        return [clock.text(text[len(prompt) :])]

    def _guess(self, text: list[int], gamma: int) -> list[int]:
        if not gamma:
            return []
        if self.lookup:
            return self.lookup(np.array(text, np.intc)).tolist()[:gamma]
        self.draft.cut(len(text) - 1)
        draft_tokens = self.draft.read(text[self.draft.length :], 1)
        self.draft.fork()
        while len(draft_tokens) < gamma:
            draft_tokens += self.draft.read(draft_tokens[-1:], 1)
        return draft_tokens


def load(request: Request) -> tuple[dict[str, Any], Any]:
    peer = Peer(request)
    dtype, said = request["dtype"], ctypes.create_string_buffer(128)
    llama.llama_model_desc(peer.target.model, said, len(said))
    same = request["setting"] == "same-precision"
    kinds = {
        "weights": "int4" if b"Q4_" in said.value else dtype,
        "cache": CACHES[dtype][0] if same else "float16",
        "activations": "int8" if b"Q" in said.value else dtype,
    }
    return {
        "version": llama.__version__,
        "precision": kinds,
        "note": "its kernels, our loop",
    }, peer.generate


if __name__ == "__main__":
    serve(load)
