"""Every knob of the engine, validated once at construction and never written afterwards.

Field names are those of the recordings; the generated reference pairs each with vLLM's spelling.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from os import PathLike

from pagedlab.errors import UserError

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTION_BACKENDS = ("auto", "torch", "triton", "flash-attn")
RUNNERS = ("persistent", "state-table")
LARGEST_COUNT = 2**31 - 1   # of tokens, blocks or requests: ids in the tables are int32
LARGEST_INT64 = 2**63 - 1   # for seeds and bytes


@dataclass(frozen=True)
class SchedulerConfig:
    """What the Scheduler needs to know (vllm/config/scheduler.py)."""

    max_num_seqs: int = 256              # most requests in the running list
    max_num_batched_tokens: int = 2048   # token budget of one step
    max_model_len: int = 2048            # most tokens of prompt plus output
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0  # 0 = off, else most tokens one request gets in a step
    policy: str = "fcfs"                 # "fcfs", "priority" or "package.module:name"

    def __post_init__(self) -> None:
        _positive(self, "max_num_seqs", "max_num_batched_tokens", "max_model_len")
        if self.policy not in ("fcfs", "priority") and (not isinstance(self.policy, str) or ":" not in self.policy):
            raise UserError(f"policy is {self.policy!r}: choose fcfs, priority or package.module:name.")
        if type(self.long_prefill_token_threshold) is not int or self.long_prefill_token_threshold < 0:
            raise UserError(
                f"long_prefill_token_threshold is {self.long_prefill_token_threshold!r}: "
                "give 0 to switch it off or a positive whole number."
            )


@dataclass(frozen=True)
class EngineConfig:
    """What a user may set. ``None`` and ``"auto"`` are resolved when the engine starts.

    Attributes:
        model: a directory or a hub id; None is the embedded model.
        num_blocks: size of the pool, null block included; None counts it from memory.
        kv_cache_memory: bytes for the KV cache; None takes a share of what is free.
        gpu_memory_utilization: share of the GPU's memory the whole engine may use.
        max_model_len: None is the model's own limit, or with num_blocks what the pool holds if that is less.
        seed: for requests without a seed of their own.
        enforce_eager: never capture or replay CUDA graphs.
    """

    model: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    attention_backend: str = "auto"
    runner: str = "persistent"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    policy: str = "fcfs"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    seed: int = 0
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        _one_of(self, "device", DEVICES)
        _one_of(self, "dtype", DTYPES)
        _one_of(self, "attention_backend", ATTENTION_BACKENDS)
        _one_of(self, "runner", RUNNERS)
        _positive(self, "block_size")
        for name in ("num_blocks", "kv_cache_memory", "max_model_len"):
            if getattr(self, name) is not None:
                _positive(self, name)
        if self.num_blocks == 1:
            raise UserError("num_blocks is 1: block 0 is the null block and holds no tokens, so give at least 2.")
        if self.model is not None and not isinstance(self.model, str | PathLike):
            raise UserError(f"model is {self.model!r}: give a directory or a hub id as text, or nothing.")
        for name in ("enable_prefix_caching", "enable_chunked_prefill", "enforce_eager"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name} is {getattr(self, name)!r}: give True or False.")
        check_seed(self.seed)
        share: object = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise UserError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization!r}: give a number above 0 and at most 1."
            )
        self.scheduler_config(self.max_model_len or 1)

    def scheduler_config(self, max_model_len: int) -> SchedulerConfig:
        """The scheduler's part, with ``max_model_len`` resolved."""
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=max_model_len,
            enable_chunked_prefill=self.enable_chunked_prefill,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            policy=self.policy,
        )

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))


def check_seed(seed: object) -> None:
    """One that torch takes.

    Raises:
        UserError: it is not a whole number from 0 to 2**63 - 1.
    """
    if type(seed) is not int or seed < 0:
        raise UserError(f"seed is {seed!r}: give a whole number of 0 or more.")
    if seed > LARGEST_INT64:
        raise UserError(f"seed is {seed}: give at most {LARGEST_INT64}.")


def _positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if type(value) is not int or value < 1:
            raise UserError(f"{name} is {value!r}: give a positive whole number.")
        most = LARGEST_INT64 if name == "kv_cache_memory" else LARGEST_COUNT
        if value > most:
            raise UserError(f"{name} is {value}: give at most {most}.")


def _one_of(config: object, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in allowed:
        raise UserError(f"{name} is {value!r}: choose one of {', '.join(allowed)}.")
