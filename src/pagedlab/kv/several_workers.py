"""How vLLM 0.14.1 sizes the pool of several workers, faults included (vllm/v1/core/kv_cache_utils.py).

Compared with recordings. The engine has one worker and asks ``resolve_max_model_len``
(kv/initialize.py), which counts what the check here forgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pagedlab.errors import UserError
from pagedlab.kv.grouping import Specs, get_kv_cache_groups
from pagedlab.kv.initialize import NotEnoughMemory, bytes_per_block, get_kv_cache_config, longest, num_tensors
from pagedlab.kv.specs import KVCacheConfig, KVCacheGroupSpec


class InconsistentWorkers(UserError, AssertionError):
    """Workers that cannot share one pool: they disagree about a layer, or one has no layer."""


class NoLayersToDivideBy(UserError, ZeroDivisionError):
    """The same for a worker without a layer where pages are unequal: 0.14.1 gets further, and divides by zero."""


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
        InconsistentWorkers, NoLayersToDivideBy: two workers disagree about a layer, or one has no layer.
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
    if groups and not specs:
        fault = NoLayersToDivideBy if groups[0].layer_specs else InconsistentWorkers
        raise fault("a worker has no layer while others have some: give every worker a layer.")
    return own


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
        fitting = longest(
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
    return num_blocks * bytes_per_block(groups)


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
    return sum(num_tensors(groups) - len(group.layer_names) for group in groups)
