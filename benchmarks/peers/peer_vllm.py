"""vLLM on a CPU, for `race.py --vs vllm`.

One engine runs for each gamma, since vLLM sets the number of draft tokens at loading. Its settings
are the defaults, except that prefix caching is off and that it has as many threads as the other
libraries. With the setting "lookup", vLLM's n-gram drafter replaces the draft model.
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

from answer import Clock, Refused, Request, Texts, serve

CONTEXT, CACHE_GB, MAX_BATCH_SIZE = 4096, 1, 16
LOOKUP_GAMMA = 4  # vLLM has no default
LOOKUP = {"method": "ngram", "num_speculative_tokens": LOOKUP_GAMMA}


class Peer:
    """The folders of a target and its draft, and an engine for each requested gamma."""

    def __init__(self, request: Request) -> None:
        self.target, self.draft, self.dtype = request["target"], request["draft"], request["dtype"]
        self.lookup = request["setting"] == "lookup"
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise Refused(
                f"vLLM runs this folder in float32, bfloat16 or float16, not {self.dtype}"
            )
        if self.draft and request["draft_dtype"] != self.dtype:
            raise Refused("vLLM runs both models in one dtype; leave out --draft-dtype")
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{request['threads'] - 1}"
        os.environ["OMP_NUM_THREADS"] = str(request["threads"])
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(CACHE_GB)
        os.environ["VLLM_NO_USAGE_STATS"] = os.environ["HF_HUB_OFFLINE"] = "1"
        self.engines: dict[int, Any] = {}

    def generate(self, request: Request) -> Texts:
        from vllm import SamplingParams  # after the environment is set

        if request["gamma"] not in self.engines:
            self.engines[request["gamma"]] = self._make_engine(request["gamma"])
        params = [
            SamplingParams(
                temperature=request["temperature"],
                top_k=request["top_k"],
                top_p=request["top_p"],
                max_tokens=request["max_new_tokens"],
                seed=seed if request["temperature"] else None,
                ignore_eos=True,
                detokenize=False,
            )
            for seed in request["seeds"]
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        clock = Clock()
        outputs = self.engines[request["gamma"]].generate(prompts, params, use_tqdm=False)
        texts = [clock.text(list(output.outputs[0].token_ids)) for output in outputs]
        firsts = [output.metrics.first_token_latency for output in outputs]
        return [
            text | {"first_tokens": 1, "first_seconds": first}
            for text, first in zip(texts, firsts, strict=True)
        ]

    def _make_engine(self, gamma: int) -> Any:
        from vllm import LLM

        drafting: dict[str, Any] | None = None
        if self.lookup:
            drafting = LOOKUP
        elif gamma:
            drafting = {"method": "draft_model", "model": self.draft}
            drafting["num_speculative_tokens"] = gamma
        return LLM(
            self.target,
            dtype=self.dtype,
            max_model_len=CONTEXT,
            max_num_seqs=MAX_BATCH_SIZE,
            speculative_config=drafting,
            skip_tokenizer_init=True,  # a random network has none
            enable_prefix_caching=False,
            disable_log_stats=False,  # for the times of first tokens
        )


def load(request: Request) -> tuple[dict[str, Any], Any]:
    peer = Peer(request)
    kinds = dict.fromkeys(("weights", "cache", "activations"), request["dtype"])
    about = {"version": importlib.metadata.version("vllm-cpu"), "precision": kinds}
    if peer.lookup:
        about["note"] = f"its own look-up, {LOOKUP_GAMMA} draft tokens"
    return about, peer.generate


if __name__ == "__main__":
    serve(load)
