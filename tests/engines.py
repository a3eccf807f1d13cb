"""Small engines without a model, of every kind, and what may happen to them; for tests and long runs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import gcd
from typing import Any

from pagedlab.config import SchedulerConfig
from pagedlab.engine.core import EngineCore
from pagedlab.errors import UserError
from pagedlab.kv.hashing import request_block_hasher
from pagedlab.kv.specs import AttentionSpec, KVCacheConfig, KVCacheGroupSpec
from pagedlab.request import Request
from pagedlab.sampling_params import SamplingParams
from pagedlab.sched.scheduler import Scheduler
from standin import StandInExecutor

# (block size, sliding window) per group
GROUPS: tuple[tuple[tuple[int, int | None], ...], ...] = (
    ((4, None),), ((1, None),), ((4, 8),), ((2, 5),), ((4, 1),),
    ((4, None), (4, 8)), ((4, None), (4, 5), (4, 12)), ((8, None), (4, 9)), ((2, None), (4, 6)),
    ((4, None), (6, None)), ((4, 6), (6, 9)),  # no block size is a multiple of the other
)  # fmt: skip


class ShortestFirst:
    """A policy of the user: shortest known text first, the longest loses its blocks."""

    rule = "the longest"

    def key(self, request: Request) -> tuple[Any, ...]:
        return (request.num_tokens,)

    def victim(self, running: Any, needing: Request) -> Request:
        return max(running, key=lambda r: r.num_tokens)

    def requeue(self, waiting: Any, victim: Request) -> None:
        waiting.add(victim)


POLICIES = ("fcfs", "priority", f"{__name__}:ShortestFirst")


@dataclass(frozen=True)
class Shape:
    """Everything that makes one engine differ from another."""

    num_blocks: int = 8
    groups: tuple[tuple[int, int | None], ...] = GROUPS[0]
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_model_len: int = 40
    long_prefill_token_threshold: int = 0

    @property
    def block_size(self) -> int:
        """The size that blocks are hashed at."""
        return gcd(*(size for size, _ in self.groups))

    @property
    def longest_prompt(self) -> int:
        """0.14.1 fault: a prompt of max_model_len tokens in chunks stands still, and as a victim it costs another
        request its turn, without a reason in the trace; in order of arrival it is never such a victim."""
        return self.max_model_len if self.policy == "fcfs" else self.max_model_len - 1

    def engine_core(self) -> EngineCore:
        specs = tuple(
            KVCacheGroupSpec((f"layer{i}",), AttentionSpec(size, 1, 8, "float32", window))
            for i, (size, window) in enumerate(self.groups)
        )
        config = SchedulerConfig(**{n: getattr(self, n) for n in SchedulerConfig.__dataclass_fields__})
        scheduler = Scheduler(config, KVCacheConfig(self.num_blocks, specs), block_size=self.block_size,
                              enable_prefix_caching=self.enable_prefix_caching)
        return EngineCore(scheduler, StandInExecutor(), about={"model": {}, "config": {}, "tokenizer": {}})

    def request(self, request_id: str, prompt: list[int], max_tokens: int = 8, priority: int = 0,
                arrival_time: float = 0.0, cache_salt: str | None = None) -> Request:
        hasher = request_block_hasher(self.block_size) if self.enable_prefix_caching else None
        return Request(request_id, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0), priority=priority,
                       arrival_time=arrival_time, cache_salt=cache_salt, block_hasher=hasher)


def random_shape(rng: random.Random) -> Shape:
    return Shape(
        num_blocks=rng.choice((2, 3, 5, 8, 12, 20, 40)),
        groups=rng.choice(GROUPS),
        enable_prefix_caching=rng.random() < 0.8,
        enable_chunked_prefill=rng.random() < 0.8,
        policy=rng.choice(POLICIES),
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=rng.choice((1, 2, 3, 5, 8, 16, 50)),
        max_model_len=rng.choice((8, 20, 40)),
        long_prefill_token_threshold=rng.choice((0, 0, 1, 3, 6)),
    )


def act_at_random(rng: random.Random, watched: Any, shape: Shape, num_added: int) -> int:
    """What may happen before one step; returns how many requests have been added so far."""
    core = watched.core
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
        if len(core.scheduler.requests) >= 10:
            break
        length = shape.longest_prompt if rng.random() < 0.01 else rng.randint(1, shape.longest_prompt)
        same_start = [7 * (i % 3) for i in range(rng.randint(0, length))]
        prompt = same_start + [rng.randrange(4) for _ in range(length - len(same_start))]
        request = shape.request(f"r{num_added}", prompt, rng.randint(1, 12), rng.randrange(3),
                                float(rng.randrange(5)), rng.choice((None, None, None, "", "salt")))
        num_added += 1
        try:
            watched.add(request, at_the_door=length < shape.max_model_len and rng.random() < 0.95)
        except UserError:
            continue
    ids = list(core.scheduler.requests)
    if ids and rng.random() < 0.06:
        core.abort_requests(rng.sample(ids, rng.randint(1, min(2, len(ids)))))
    if ids and rng.random() < 0.03:
        watched.meanwhile.append(lambda: core.abort_requests([rng.choice(ids)]))
    if rng.random() < 0.03:
        core.reset_prefix_cache()
    return num_added
