"""From layers and bytes to one pool of blocks (vllm/v1/core/kv_cache_utils.py).

The engine calls, once, before the first request: ``get_kv_cache_groups`` (kv/grouping.py) to find
which layers share block tables, :func:`get_kv_cache_config` to count blocks, and
:func:`resolve_max_model_len` to see what one request may need of them. Nothing here touches memory:
the worker allocates what the ``KVCacheConfig`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from pagedlab.errors import UserError
from pagedlab.kv.grouping import Specs
from pagedlab.kv.specs import AttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from pagedlab.trace.events import Event, KvConfig, KvGroup, KvMemory, KvSpec, KvTensor, Scalar
from pagedlab.wording import are, plural


class NotEnoughMemory(UserError):
    """One request of the longest allowed length needs more than there is."""

    def __init__(self, message: str, fitting_max_model_len: int = 0) -> None:
        super().__init__(message)
        self.fitting_max_model_len = fitting_max_model_len  # 0: not even one token fits


def get_kv_cache_config(
    groups: tuple[KVCacheGroupSpec, ...], available_bytes: int, num_blocks_override: int | None = None
) -> KVCacheConfig:
    """Count the blocks that fit, and lay out the buffers.

    Buffer i is viewed by the i-th layer of every group. That is safe because a block id is held by
    one group at a time. Qwen3-0.6B in bfloat16 at block size 16: one group of 28 layers, 65,536 bytes
    per layer and block, so 1 GiB holds 1,073,741,824 // 65,536 // 28 = 585 blocks. 6 full + 18 window
    layers: 4 groups, 6 buffers, 1,073,741,824 // 65,536 // 6 = 2,730 blocks.
    """
    if not groups:
        return KVCacheConfig(1, ())  # the null block always has a place
    if num_blocks_override is None:
        num_blocks = max(available_bytes // bytes_per_block(groups), 0)
    else:
        num_blocks = num_blocks_override  # as in 0.14.1, not checked against the bytes
    tensors = []
    for i in range(num_tensors(groups)):
        shared_by = tuple(group.layer_names[i] for group in groups if i < len(group.layer_names))
        tensors.append(KVCacheTensor(groups[0].spec_of(shared_by[0]).page_size_bytes * num_blocks, shared_by))
    return KVCacheConfig(num_blocks, groups, tuple(tensors))


def num_tensors(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Layers of the largest group: each has one buffer, shared with one layer of every other group."""
    return max(len(group.layer_names) for group in groups)


def bytes_per_block(groups: Sequence[KVCacheGroupSpec]) -> int:
    """What one block costs, over all buffers."""
    if groups[0].layer_specs:  # pages are unequal: the group's page is the sum over its layers
        return groups[0].page_size_bytes
    return groups[0].page_size_bytes * num_tensors(groups)


def resolve_max_model_len(
    config: KVCacheConfig,
    available_bytes: int,
    *,
    max_model_len: int | None,
    model_max_len: int,
    max_num_batched_tokens: int,
    num_blocks_given: bool,
) -> tuple[int, str | None]:
    """Give the engine a request length that its pool can serve, and a warning if it is in doubt.

    Blocks counted from memory: a length that does not fit is refused. This is stricter than vLLM
    0.14.1, whose check counts the first group only and forgets that the null block holds no
    tokens, so that it starts and then never schedules such a request. Blocks given by hand: an
    unset length becomes what the usable blocks hold, a longer one is allowed and warned about.
    For example 8 blocks of 16 tokens, one of them the null block, hold 7 · 16 = 112 tokens.

    Args:
        max_model_len: what the user asked for; None is the model's own limit.
        model_max_len: the model's own limit.
        num_blocks_given: by hand, and not counted from ``available_bytes``.

    Returns:
        The length, and a sentence to print on stderr or None.

    Raises:
        UserError: the length is beyond the model's limit, or does not fit.
    """
    if max_model_len is not None and max_model_len > model_max_len:
        raise UserError(
            f"max_model_len is {max_model_len:,} but the model's own limit is {model_max_len:,} tokens: "
            f"give {model_max_len} or less."
        )
    wanted, usable, groups = max_model_len or model_max_len, config.num_blocks - 1, config.kv_cache_groups

    def num_needed(length: int) -> int:
        return sum(_most_blocks_held(group.kv_cache_spec, length, max_num_batched_tokens) for group in groups)

    if num_needed(wanted) <= usable:
        return wanted, None
    fitting = longest(wanted, lambda length: num_needed(length) <= usable)
    if not num_blocks_given:
        raise _does_not_fit(config, available_bytes, wanted, num_needed(wanted), fitting)
    if fitting == 0:
        raise NotEnoughMemory(
            f"num_blocks is {config.num_blocks}: {plural(usable, 'usable block')} cannot hold a request at all, as "
            f"{len(groups)} KV-cache groups need a block each; give at least {num_needed(1) + 1}."
        )
    if max_model_len is None:
        return fitting, None
    return max_model_len, (
        f"one request of max_model_len {max_model_len:,} needs {plural(num_needed(max_model_len), 'block')} and "
        f"{are(usable)} usable: requests longer than {plural(fitting, 'token')} will be refused or ended."
    )


def _most_blocks_held(spec: AttentionSpec, length: int, max_num_batched_tokens: int) -> int:
    """As ``max_blocks``, but a short request in a long window does not hold more than its own blocks."""
    return min(-(-length // spec.block_size), spec.max_blocks(length, max_num_batched_tokens))


def _does_not_fit(
    config: KVCacheConfig, available_bytes: int, length: int, num_needed: int, fitting: int
) -> NotEnoughMemory:
    per_block = bytes_per_block(config.kv_cache_groups)
    advice = f"give max_model_len {fitting} or less, or" if fitting else "give"
    return NotEnoughMemory(
        f"one request of max_model_len {length:,} needs {plural(num_needed, 'block')}, but {available_bytes:,} bytes "
        f"hold {plural(max(config.num_blocks - 1, 0), 'usable block')} beside the null block, at {per_block:,} "
        f"bytes each: {advice} at least {(num_needed + 1) * per_block} bytes of KV-cache memory.",
        fitting,
    )


def longest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest length from 1 to ``most`` that fits, 0 if none does; fits must be monotone."""
    low, high = 0, most  # low fits, above high nothing does
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def initialization_events(
    specs: Specs, config: KVCacheConfig, available_bytes: int, how: str, terms: Mapping[str, Scalar], max_model_len: int
) -> Iterator[Event]:
    """What every layer needs, how many bytes there are and ``how`` that was found, and what came of it."""
    for name, spec in specs.items():
        yield KvSpec(
            layer=name, kind_of_attention=spec.kind, block_size=spec.block_size, num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_size, dtype=spec.dtype, sliding_window=spec.sliding_window,
            page_bytes=spec.page_size_bytes,
        )  # fmt: skip
    yield KvMemory(available_bytes=available_bytes, how=how, terms=dict(terms))
    yield KvConfig(
        num_blocks=config.num_blocks,
        groups=[
            KvGroup(
                kind_of_attention=group.kv_cache_spec.kind, block_size=group.kv_cache_spec.block_size,
                sliding_window=group.kv_cache_spec.sliding_window, page_bytes=group.page_size_bytes,
                layers=list(group.layer_names),
            )
            for group in config.kv_cache_groups
        ],
        tensors=[KvTensor(size=t.size, shared_by=list(t.shared_by)) for t in config.kv_cache_tensors],
        bytes_per_block=bytes_per_block(config.kv_cache_groups), available_bytes=available_bytes,
        max_model_len=max_model_len,
    )  # fmt: skip
