"""Startup of an engine's process: load the models, measure the costs of steps, and serve requests
from the pipe."""

from __future__ import annotations

import gc
import logging
import pickle
from multiprocessing.connection import Connection

from transformers.utils import logging as transformers_logging

from foretoken.engine.engine import Engine
from foretoken.errors import ForetokenError, get_base_name, to_one_line
from foretoken.loading.load import load_checked, require_adapters
from foretoken.loading.target import TargetInfo
from foretoken.sampling.params import SamplingParams
from foretoken.server.process.messages import EngineSetup, LoadFailed
from foretoken.server.process.replies import ReplyPreparer
from foretoken.server.process.sandbox import MediaSandbox
from foretoken.server.process.worker import Worker
from foretoken.slow_log import log_if_slow
from foretoken.speculator import Speculator

log = logging.getLogger(__name__)


def serve(pipe: Connection, setup: EngineSetup) -> None:
    """Load the models and serve requests until the pipe is closed. If the models cannot be loaded,
    send `LoadFailed` and return."""
    try:
        spec, replies = load(setup)
        name = get_base_name(spec.target_name)
        engine = Engine(spec, **setup.engine)
        spec.inputs.prepare_grammars()
        with log_if_slow(log, "measuring the costs of steps of %s", name):
            measure_step_costs(spec, engine.max_rows)
        # Otherwise each garbage collection would scan all loaded objects, for a tenth of a second
        gc.collect()
        gc.freeze()
    except (ForetokenError, OSError) as error:
        pipe.send(LoadFailed(to_one_line(error)))
        return
    with engine:
        media = MediaSandbox(setup.max_pixels, setup.max_seconds)
        Worker(pipe, spec, engine, replies, media).run()


def load(setup: EngineSetup) -> tuple[Speculator, ReplyPreparer]:
    """Load the models and return them with a ReplyPreparer for the target. The ReplyPreparer is
    made before the draft is loaded, so that an unsupported tool parser is reported early. Raises
    ForetokenError or OSError."""
    transformers_logging.disable_progress_bar()
    require_adapters(setup.target, setup.adapters, **setup.loading)
    preparers: list[ReplyPreparer] = []

    def read_replies(target: TargetInfo) -> None:
        preparers.append(ReplyPreparer(target.tokenizer, setup.chat_template, setup.tool_parser))
        log.info(
            "%s", preparers[0].description if preparers[0].template else describe_missing(target)
        )

    spec = load_checked(read_replies, setup.target, setup.draft, **setup.loading)
    with log_if_slow(log, "choosing a draft for %s, once", get_base_name(spec.target_name)):
        spec = spec.prepared()
    if setup.costs is not None:
        spec.costing.adopt_measured(pickle.loads(setup.costs))
    return spec, preparers[0]


def describe_missing(target: TargetInfo) -> str:
    """Return a line for the log: the requests that are refused because the target has no tokenizer
    or chat template, and the remedy."""
    name = get_base_name(target.name)
    if target.tokenizer is None:
        return f"{name} has no tokenizer, so requests must have token ids; give --tokenizer"
    return f"{name} has no chat template, so chats are refused; give --chat-template FILE"


def measure_step_costs(spec: Speculator, batch_size: int) -> None:
    """Measure the costs of greedy and of sampled steps before requests arrive. Without a draft, the
    costs are needed for requests with a predicted output."""
    sampled = SamplingParams(temperature=0.7, top_k=50, top_p=0.9)
    for params in (SamplingParams(), sampled):
        spec.costing.get_step_costs(params, batch_size, remeasure=True)
