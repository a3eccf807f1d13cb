"""From layers and bytes to one pool of blocks (vllm/v1/core/kv_cache_utils.py).

Read it top down: :func:`initialize` is what the engine calls, once, before the first request.

1. Group. Layers that forget tokens at the same time share block tables (``kv/grouping.py``).
2. Count. The bytes of one block, over all buffers, say how many blocks there are
   (:func:`get_kv_cache_config`).
3. Check. Does one request of ``max_model_len`` fit? vLLM 0.14.1's own check is here because it is
   compared with recordings (:func:`check_enough_memory`); the engine uses the stricter
   :func:`resolve_max_model_len`, which counts what 0.14.1 forgets.

Nothing here touches memory: the worker allocates what the ``KVCacheConfig`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pagedlab.errors import UserError
from pagedlab.kv.grouping import Specs, get_kv_cache_groups
from pagedlab.kv.specs import AttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from pagedlab.trace.events import KvConfig, KvGroup, KvMemory, KvSpec, KvTensor, Scalar
from pagedlab.trace.tracer import trace
from pagedlab.wording import are, plural


class NotEnoughMemory(UserError):
    """One request of the longest allowed length needs more than there is."""

    def __init__(self, message: str, fitting_max_model_len: int = 0) -> None:
        super().__init__(message)
        self.fitting_max_model_len = fitting_max_model_len  # 0: not even one token fits


class InconsistentWorkers(UserError, AssertionError):
    """Workers that cannot share one pool: they disagree about a layer, or one has no layer."""


# ------------------------------------------------------------------ what the engine calls


def initialize(
    specs: Specs,
    available_bytes: int,
    how: str,
    terms: Mapping[str, Scalar],
    *,
    max_model_len: int,
    num_blocks: int | None = None,
) -> KVCacheConfig:
    """Decide groups, blocks and buffers for one worker, and say so in events.

    Qwen3-0.6B in bfloat16 at block size 16: 65,536 bytes per layer and block, 28 layers, so
    1,835,008 bytes per block, and 1 GiB holds 1,073,741,824 // 1,835,008 = 585 blocks.

    Args:
        how, terms: where ``available_bytes`` comes from, for the trace.
        max_model_len: as :func:`resolve_max_model_len` gave it, which is the check.
        num_blocks: taken instead of counting from bytes.

    Raises:
        UserError: the layers' pages cannot be made equal, or no block fits.
    """
    groups = get_kv_cache_groups(specs)
    config = get_kv_cache_config(groups, available_bytes, num_blocks)
    _emit_initialization(specs, config, available_bytes, how, terms, max_model_len)
    return config


def resolve_max_model_len(
    specs: Specs,
    available_bytes: int,
    *,
    max_model_len: int | None,
    model_max_len: int,
    max_num_batched_tokens: int,
    num_blocks: int | None = None,
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
        num_blocks: given by hand, null block included; None counts them from the bytes.

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
    wanted = max_model_len or model_max_len
    groups = get_kv_cache_groups(specs)
    if not groups:
        return wanted, None
    config = get_kv_cache_config(groups, available_bytes, num_blocks)
    usable = config.num_blocks - 1

    def num_needed(length: int) -> int:
        return sum(_most_blocks_held(group.kv_cache_spec, length, max_num_batched_tokens) for group in groups)

    if num_needed(wanted) <= usable:
        return wanted, None
    fitting = _longest(wanted, lambda length: num_needed(length) <= usable)
    if num_blocks is None:
        raise _does_not_fit(config, available_bytes, wanted, num_needed(wanted), fitting)
    if fitting == 0:
        raise NotEnoughMemory(
            f"num_blocks is {num_blocks}: {plural(usable, 'usable block')} cannot hold a request at all, as "
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
    per_block = _bytes_per_block(config.kv_cache_groups)
    advice = f"give max_model_len {fitting} or less, or" if fitting else "give"
    return NotEnoughMemory(
        f"one request of max_model_len {length:,} needs {plural(num_needed, 'block')}, but {available_bytes:,} bytes "
        f"hold {plural(max(config.num_blocks - 1, 0), 'usable block')} beside the null block, at {per_block:,} "
        f"bytes each: {advice} at least {(num_needed + 1) * per_block} bytes of KV-cache memory.",
        fitting,
    )


def _emit_initialization(
    specs: Specs, config: KVCacheConfig, available_bytes: int, how: str, terms: Mapping[str, Scalar], max_model_len: int
) -> None:
    if trace.on:
        for name, spec in specs.items():
            trace.emit(
                KvSpec(
                    layer=name, kind_of_attention=spec.kind, block_size=spec.block_size, num_kv_heads=spec.num_kv_heads,
                    head_dim=spec.head_size, dtype=spec.dtype, sliding_window=spec.sliding_window,
                    page_bytes=spec.page_size_bytes,
                )
            )  # fmt: skip
        trace.emit(KvMemory(available_bytes=available_bytes, how=how, terms=dict(terms)))
        trace.emit(
            KvConfig(
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
                bytes_per_block=config.bytes_per_block,
                available_bytes=available_bytes,
                max_model_len=max_model_len,
            )
        )  # fmt: skip


# ------------------------------------------------------------------ step 2: blocks and buffers


def get_kv_cache_config(
    groups: tuple[KVCacheGroupSpec, ...], available_bytes: int, num_blocks_override: int | None = None
) -> KVCacheConfig:
    """Count the blocks that fit, and lay out the buffers.

    Buffer i is viewed by the i-th layer of every group. That is safe because a block id is held by
    one group at a time. 6 full + 18 window layers in 1 GiB: 4 groups, 6 buffers,
    1,073,741,824 // 65,536 // 6 = 2,730 blocks.
    """
    if not groups:
        return KVCacheConfig(1, ())  # the null block always has a place
    if num_blocks_override is None:
        num_blocks = max(available_bytes // _bytes_per_block(groups), 0)
    else:
        num_blocks = num_blocks_override  # as in 0.14.1, not checked against the bytes
    if groups[0].layer_specs:
        tensors = [
            KVCacheTensor(groups[0].spec_of(name).page_size_bytes * num_blocks, (name,))
            for name in groups[0].layer_names
        ]
    else:
        size = groups[0].page_size_bytes * num_blocks
        tensors = [
            KVCacheTensor(size, tuple(group.layer_names[i] for group in groups if i < len(group.layer_names)))
            for i in range(_num_tensors(groups))
        ]
    return KVCacheConfig(num_blocks, groups, tuple(tensors))


def _num_tensors(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Layers of the largest group: each has one buffer, shared with one layer of every other group."""
    return max(len(group.layer_names) for group in groups)


def _bytes_per_block(groups: Sequence[KVCacheGroupSpec]) -> int:
    if groups[0].layer_specs:  # pages are unequal: the group's page is the sum over its layers
        return groups[0].page_size_bytes
    return groups[0].page_size_bytes * _num_tensors(groups)


def get_kv_cache_configs(
    specs_by_worker: list[Specs],
    available_bytes: list[int],
    *,
    max_model_len: int,
    max_num_batched_tokens: int = 2048,
    num_blocks_override: int | None = None,
    disable_hybrid_kv_cache_manager: bool = False,
) -> list[KVCacheConfig]:
    """One pool for several workers, exactly as vLLM 0.14.1 decides it.

    Tensor-parallel workers have the same layers, pipeline stages different ones. Groups are made
    from the whole model's layers, blocks are counted per worker, and the smallest count holds for
    all: the others' buffers shrink.

    Raises:
        InconsistentWorkers: two workers disagree about a layer, or one has no layer.
        NotEnoughMemory: see :func:`check_enough_memory`.
        UserError: see :func:`get_kv_cache_groups`.
    """
    groups = get_kv_cache_groups(
        merge_specs(specs_by_worker), disable_hybrid_kv_cache_manager=disable_hybrid_kv_cache_manager
    )
    # Known fault of 0.14.1: a pipeline stage is asked for the bytes of all stages' layers.
    check_enough_memory(groups, min(available_bytes), max_model_len, max_num_batched_tokens)
    configs = [
        get_kv_cache_config(_groups_of_worker(groups, specs), num_bytes, num_blocks_override)
        for specs, num_bytes in zip(specs_by_worker, available_bytes, strict=True)
    ]
    num_blocks = min(config.num_blocks for config in configs)
    return [
        KVCacheConfig(
            num_blocks,
            config.kv_cache_groups,
            tuple(replace(t, size=t.size // config.num_blocks * num_blocks) for t in config.kv_cache_tensors),
        )
        for config in configs
    ]


def merge_specs(specs_by_worker: list[Specs]) -> Specs:
    """The whole model's layers, in order of first appearance over the workers."""
    merged: Specs = {}
    for specs in specs_by_worker:
        for name, spec in specs.items():
            if merged.setdefault(name, spec) != spec:
                raise InconsistentWorkers(f"two workers disagree about what layer {name} needs: give it one spec.")
    return merged


def _groups_of_worker(groups: tuple[KVCacheGroupSpec, ...], specs: Specs) -> tuple[KVCacheGroupSpec, ...]:
    """The same groups with this worker's layers only.

    Known fault of 0.14.1: where pages are unequal, ``layer_specs`` keeps the layers of all pipeline
    stages, so each stage counts its blocks with the bytes of the whole model.
    """
    own = tuple(replace(g, layer_names=tuple(n for n in g.layer_names if n in specs)) for g in groups)
    if groups and not specs:  # 0.14.1 ends on an assertion, or divides by zero where pages are unequal
        raise InconsistentWorkers("a worker has no layer while others have some: give every worker a layer.")
    return own


# ------------------------------------------------------------------ step 3: vLLM's own check


def check_enough_memory(
    groups: tuple[KVCacheGroupSpec, ...], available_bytes: int, max_model_len: int, max_num_batched_tokens: int
) -> None:
    """vLLM 0.14.1's start-up check, faults included; the engine uses :func:`resolve_max_model_len`.

    Raises:
        NotEnoughMemory: with the length that would fit by the same count.
    """
    if not groups:
        return
    if available_bytes <= 0:
        raise NotEnoughMemory("no memory is left for the KV cache: give it more.")
    needed = checked_need_bytes(groups, max_model_len, max_num_batched_tokens)
    if needed > available_bytes:
        fitting = _longest(
            max_model_len,
            lambda length: checked_need_bytes(groups, length, max_num_batched_tokens) <= available_bytes,
        )
        raise NotEnoughMemory(
            f"one request of max_model_len {max_model_len:,} needs {needed:,} bytes of KV cache and there are "
            f"{available_bytes:,}: give more memory or a max_model_len of at most {fitting}.",
            fitting,
        )


def checked_need_bytes(groups: Sequence[KVCacheGroupSpec], max_model_len: int, max_num_batched_tokens: int) -> int:
    """The bytes that 0.14.1 believes one longest request needs.

    With 6 full + 18 window layers and 2,048 tokens it asks for 129 blocks of 6 · 65,536 bytes,
    50,724,864 in all; the request takes 129 + 129 + 129 + 128 = 515 blocks.
    """
    if not groups:
        return 0
    # Known fault of 0.14.1: only the first group's blocks are counted (repaired later, pull request 36030).
    num_blocks = groups[0].kv_cache_spec.max_blocks(max_model_len, max_num_batched_tokens)
    # Known fault of 0.14.1: the null block's bytes are counted as usable, so exactly enough is one too few.
    return num_blocks * _bytes_per_block(groups)


def _longest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest length from 1 to ``most`` that fits, 0 if none does; fits must be monotone."""
    low, high = 0, most  # low fits, above high nothing does
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


# ------------------------------------------------------------------ figures for people


def max_concurrency(config: KVCacheConfig, max_model_len: int, max_num_batched_tokens: int) -> float:
    """How many longest requests the pool holds at once, as vLLM reports it at start-up: no promise."""
    num_blocks = sum(g.kv_cache_spec.max_blocks(max_model_len, max_num_batched_tokens) for g in config.kv_cache_groups)
    return config.num_blocks / num_blocks


def reported_cache_tokens(config: KVCacheConfig) -> int:
    """The token count that vLLM logs at start-up; it counts the null block, and the smallest block size."""
    smallest = min(group.kv_cache_spec.block_size for group in config.kv_cache_groups)
    return config.num_blocks // len(config.kv_cache_groups) * smallest


def num_padding_layers(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Empty places in the groups: buffers' shares that nobody uses."""
    return sum(_num_tensors(groups) - len(group.layer_names) for group in groups)
