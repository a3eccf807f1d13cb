"""What the worker's recordings are replayed on: a scheduler and a worker, without text around them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pagedlab.config import EngineConfig
from pagedlab.errors import UserError
from pagedlab.kv.grouping import get_kv_cache_groups
from pagedlab.kv.initialize import get_kv_cache_config
from pagedlab.kv.specs import AttentionSpec, KVCacheConfig, KVCacheGroupSpec
from pagedlab.models.config import ModelConfig
from pagedlab.sched.scheduler import Scheduler
from pagedlab.trace.events import Event
from pagedlab.trace.tracer import trace
from pagedlab.worker.worker import Worker

Document = dict[str, Any]


def run_config(document: Document) -> EngineConfig:
    """The knobs of a recorded run, which was made on a CPU.

    Raises:
        UserError: a knob is impossible, or the size of the pool or of the longest request is missing.
    """
    known = {name: value for name, value in document["config"].items() if name in EngineConfig.field_names()}
    for name in ("num_blocks", "max_model_len"):
        if known.get(name) is None:
            raise UserError(f"the config of the recorded run has no {name}.")
    return EngineConfig(device="cpu", **known)


def build_engine(model_dir: Path, config: EngineConfig) -> tuple[Scheduler, Worker]:
    """An engine whose pool and request length are given."""
    assert config.num_blocks is not None and config.max_model_len is not None
    worker = Worker(replace(config, model=str(model_dir)), ModelConfig.from_directory(model_dir), model_dir)
    worker.load_model()
    kv_cache_config = get_kv_cache_config(get_kv_cache_groups(worker.get_kv_cache_specs()), 0, config.num_blocks)
    worker.initialize_from_config(kv_cache_config, config.max_model_len)
    scheduler = Scheduler(
        config.scheduler_config(config.max_model_len),
        kv_cache_config,
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    return scheduler, worker


def one_group(block_size: int, num_blocks: int = 2) -> KVCacheConfig:
    """The KV cache of a runner without a model: one group, no memory."""
    spec = AttentionSpec(block_size, num_kv_heads=1, head_size=1, dtype="float32")
    return KVCacheConfig(num_blocks, (KVCacheGroupSpec(("layer.0",), spec),))


@contextmanager
def one_thread() -> Iterator[None]:
    """Recorded models are tiny: on a busy machine, threads that wait for each other cost a hundredfold."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@contextmanager
def recorded_events() -> Iterator[list[Event]]:
    """What the engine says about itself inside the block, up to the level of tensors."""
    events: list[Event] = []
    trace.start(events, record="tensors")
    try:
        yield events
    finally:
        trace.stop()
