"""From an EngineConfig to an engine: find the model, load it, size and make its cache, join the halves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from pagedlab.config import EngineConfig
from pagedlab.engine.core import EngineCore, next_engine_id
from pagedlab.engine.tokenizer import Tokenizer
from pagedlab.errors import UserError, notice
from pagedlab.kv.grouping import get_kv_cache_groups
from pagedlab.kv.initialize import bytes_per_block, get_kv_cache_config, initialization_events, resolve_max_model_len
from pagedlab.kv.specs import KVCacheConfig, KVCacheGroupSpec
from pagedlab.memory import free_ram_bytes
from pagedlab.models.config import ModelConfig
from pagedlab.models.resolve import display_name, resolve_model
from pagedlab.sched.scheduler import Scheduler
from pagedlab.trace.events import EngineSnapshot, Scalar
from pagedlab.trace.tracer import trace
from pagedlab.wording import plural
from pagedlab.worker.kv_memory import Available
from pagedlab.worker.worker import Worker


@dataclass(frozen=True)
class BuiltEngine:
    """The parts, ready to run."""

    core: EngineCore
    tokenizer: Tokenizer | None        # None: the model folder has no tokenizer.json
    model_config: ModelConfig
    kv_cache_config: KVCacheConfig
    max_model_len: int                 # resolved
    startup_seconds: dict[str, float]  # where the time went


def build_engine(config: EngineConfig) -> BuiltEngine:
    """Build in this order: the cache's size needs the model in memory, the scheduler needs the cache's size.

    Raises:
        UserError: no such model, or it does not fit.
    """
    seconds: dict[str, float] = {}
    with _timed("find the model", seconds):
        model_dir = resolve_model(config.model)
        model_config = ModelConfig.from_directory(model_dir)
    with _timed("read the tokenizer", seconds):
        tokenizer = Tokenizer(model_dir) if (model_dir / "tokenizer.json").is_file() else None
    with _timed("load the weights", seconds):
        token_text = None if tokenizer is None else tokenizer.token_text
        worker = Worker(config, model_config, model_dir, token_text)
        worker.load_model()
    with _timed("initialize the KV cache", seconds):
        engine_id = next_engine_id()
        about = _describe(config, model_config, worker, tokenizer)
        kv_cache_config, max_model_len = _make_kv_cache(worker, config, model_config, engine_id, about)
    scheduler = Scheduler(
        config.scheduler_config(max_model_len),
        kv_cache_config,
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    core = EngineCore(scheduler, worker, about=about, engine_id=engine_id, token_text=token_text)
    return BuiltEngine(core, tokenizer, model_config, kv_cache_config, max_model_len, seconds)


def _make_kv_cache(
    worker: Worker,
    config: EngineConfig,
    model_config: ModelConfig,
    engine_id: int,
    about: dict[str, dict[str, Any]],
) -> tuple[KVCacheConfig, int]:
    """Memory → blocks → longest request → buffers; the trace begins here, with the header complete."""
    specs = worker.get_kv_cache_specs()
    groups = get_kv_cache_groups(specs)
    available_bytes, how, terms = _available_memory(worker, config, groups)
    kv_cache_config = get_kv_cache_config(groups, available_bytes, config.num_blocks)
    max_model_len, warning = resolve_max_model_len(
        kv_cache_config,
        available_bytes,
        max_model_len=config.max_model_len,
        model_max_len=model_config.max_position_embeddings,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_blocks_given=config.num_blocks is not None,
    )
    if warning:
        notice(warning)
    about["config"] |= {"max_model_len": max_model_len, "num_blocks": kv_cache_config.num_blocks}
    if trace.on:
        trace.enter(_EngineUnderConstruction(engine_id, about))
        for event in initialization_events(specs, kv_cache_config, available_bytes, how, terms, max_model_len):
            trace.emit(event)
    _allocate(worker, config, kv_cache_config, max_model_len)
    return kv_cache_config, max_model_len


def _available_memory(worker: Worker, config: EngineConfig, groups: tuple[KVCacheGroupSpec, ...]) -> Available:
    """Bytes for the KV cache; with ``num_blocks`` given, what so many blocks take."""
    if config.num_blocks is None:
        too_large = (
            f"the largest step, of {plural(config.max_num_batched_tokens, 'token')} and "
            f"{plural(config.max_num_seqs, 'request')}, does not fit beside the model: lower max_num_batched_tokens "
            "or max_num_seqs."
        )
        with _out_of_memory_says(too_large):
            return worker.determine_available_memory()
    terms: dict[str, Scalar] = {"num_blocks": config.num_blocks, "bytes_per_block": bytes_per_block(groups)}
    return config.num_blocks * bytes_per_block(groups), "num_blocks_given", terms


def _allocate(worker: Worker, config: EngineConfig, kv_cache_config: KVCacheConfig, max_model_len: int) -> None:
    """Have the worker make the cache and its tables; more than the machine can give is a user's mistake.

    A CPU's system may promise any amount and kill the process later, so what is free is asked first.
    """
    needs = _memory_needs(config, kv_cache_config, max_model_len)
    size, what, knobs = max(needs)
    too_large = f"{what} {size / 2**30:,.1f} GiB, more than this machine can give: lower {knobs}."
    if worker.device.type == "cpu" and sum(need[0] for need in needs) > free_ram_bytes():
        raise UserError(too_large)
    with _out_of_memory_says(too_large):
        worker.initialize_from_config(kv_cache_config, max_model_len)


def _memory_needs(
    config: EngineConfig, kv_cache_config: KVCacheConfig, max_model_len: int
) -> list[tuple[int, str, str]]:
    """(bytes, what takes them, the knobs that make it smaller); of the tables only what grows.

    256 seats of 4,096 tokens at block size 16: 4 B for each token id, and for each of 256 block ids in
    the table and in the copy that a step reads: 256 · 4 · (4,096 + 2 · 256) = 4.5 MiB.
    """
    sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
    seat = 4 * (max_model_len + 2 * sum(-(-max_model_len // size) for size in sizes))
    cache = sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors)
    seats, tokens = config.max_num_seqs, config.max_num_batched_tokens
    return [
        (cache, f"the KV cache of {kv_cache_config.num_blocks:,} blocks takes", "num_blocks or kv_cache_memory"),
        (seats * seat, f"the tables of {plural(seats, 'request')} of {plural(max_model_len, 'token')} take",
         "max_num_seqs or max_model_len"),
        (tokens * 8 * len(sizes), f"the slots of a step of {tokens:,} tokens take", "max_num_batched_tokens"),
    ]  # fmt: skip


@contextmanager
def _out_of_memory_says(sentence: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as e:  # torch raises the first, numpy the second
        text = str(e).lower()
        if isinstance(e, RuntimeError) and ("memory" not in text or "memory access" in text):  # a GPU's "illegal" one
            raise
        raise UserError(sentence) from e


def _describe(
    config: EngineConfig, model_config: ModelConfig, worker: Worker, tokenizer: Tokenizer | None
) -> dict[str, dict[str, Any]]:
    """The header's model, config and tokenizer: what this engine is, with everything resolved."""
    model = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(model_config).items()}
    return {
        "model": {"name": display_name(config.model), **model, "num_parameters": worker.runner.model.num_parameters},
        "config": {
            **asdict(config),
            "device": str(worker.device),
            "dtype": str(worker.dtype).removeprefix("torch."),
            "attention_backend": worker.backend.name,
        },
        "tokenizer": {} if tokenizer is None else dict(tokenizer.describe()),
    }


@dataclass
class _EngineUnderConstruction:
    """What the tracer is told before there is an engine: its id and the header, and no state yet."""

    engine_id: int
    about: dict[str, dict[str, Any]]
    step_id = -1

    def snapshot(self) -> EngineSnapshot | None:
        return None


@contextmanager
def _timed(part: str, seconds: dict[str, float]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[part] = time.perf_counter() - start
