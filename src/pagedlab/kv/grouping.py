"""Which layers share block tables (grouping in vllm/v1/core/kv_cache_utils.py)."""

from __future__ import annotations

from dataclasses import replace

from pagedlab.errors import UserError
from pagedlab.kv.specs import AttentionSpec, KVCacheGroupSpec

Specs = dict[str, AttentionSpec]  # layer name -> what its cache needs, in model order


class UnequalPages(UserError, NotImplementedError):
    """Pages of two sizes where the larger is no multiple of the smaller."""

    def __init__(self, message: str, page_sizes: list[int]) -> None:
        super().__init__(message)
        self.page_sizes = page_sizes  # largest first


def get_kv_cache_groups(specs: Specs, *, disable_hybrid_kv_cache_manager: bool = False) -> tuple[KVCacheGroupSpec, ...]:
    """Put layers that keep and forget the same tokens together.

    In order: no layer, no group; equal specs, one group; one type with unequal pages (all full, or
    all the same window), one group whose layers keep their own specs; else several groups of equal
    size, after pages have been made equal.

    Raises:
        UnequalPages: pages differ and cannot be made equal.
        UserError: ``disable_hybrid_kv_cache_manager`` and the layers are not of one type even so.
    """
    if not specs:
        return ()
    if disable_hybrid_kv_cache_manager:
        specs = _give_windows_all_blocks(specs)
    one_spec = _merged_spec(list(specs.values()))
    if one_spec is not None:
        return (KVCacheGroupSpec(tuple(specs), one_spec),)
    if _is_one_type(specs):
        first_spec = next(iter(specs.values()))
        return (KVCacheGroupSpec(tuple(specs), first_spec, dict(specs)),)
    return _equal_groups(_unify_pages(specs))


def _merged_spec(specs: list[AttentionSpec]) -> AttentionSpec | None:
    """The one spec that stands for all of them, or None.

    Full-attention layers are equal even if some of them keep a window for their attention.
    """
    if all(spec.kind == "full" for spec in specs):
        windows = {spec.sliding_window for spec in specs} - {None}
        if len(windows) > 1:
            raise UserError(
                f"full-attention layers with the windows {sorted(w for w in windows if w)} cannot share a group: "
                "leave the hybrid KV-cache manager on."
            )
        window = windows.pop() if windows else None
        specs = [replace(spec, sliding_window=window, keeps_all_blocks=window is not None) for spec in specs]
    return specs[0] if all(spec == specs[0] for spec in specs) else None


def _is_one_type(specs: Specs) -> bool:
    """Whether all layers need slots for the same tokens, in blocks of the same size."""
    types = {
        (spec.block_size, spec.kind, None if spec.kind == "full" else spec.sliding_window) for spec in specs.values()
    }
    return len(types) == 1


def _give_windows_all_blocks(specs: Specs) -> Specs:
    """Without the hybrid manager window layers next to full ones get blocks for all tokens."""
    if _merged_spec(list(specs.values())) is not None or _is_one_type(specs):
        return specs
    if any(spec.kind == "full" for spec in specs.values()):
        specs = {
            name: replace(spec, keeps_all_blocks=True) if spec.kind == "sliding_window" else spec
            for name, spec in specs.items()
        }
    if _merged_spec(list(specs.values())) is None and not _is_one_type(specs):
        raise UserError(
            "the layers are of several attention types and none is full: leave the hybrid KV-cache manager on."
        )
    return specs


def _unify_pages(specs: Specs) -> Specs:
    """Make all pages equal: layers with smaller ones get more tokens per block.

    8 heads and 4 heads at 16 tokens per block: the latter get blocks of 32 tokens.
    """
    largest = max(spec.page_size_bytes for spec in specs.values())
    unified = {}
    for name, spec in specs.items():
        ratio, rest = divmod(largest, spec.page_size_bytes)
        if rest:
            raise UnequalPages(
                f"layer {name} has pages of {spec.page_size_bytes:,} bytes, of which the largest page of "
                f"{largest:,} bytes is no multiple: such a model's layers cannot share one pool.",
                sorted({other.page_size_bytes for other in specs.values()}, reverse=True),
            )
        unified[name] = replace(spec, block_size=spec.block_size * ratio)
    return unified


def _equal_groups(specs: Specs) -> tuple[KVCacheGroupSpec, ...]:
    """Cut each type's layers into groups of one size, so that every block costs the same bytes.

    6 full layers and 18 with a window: 6 is the size, the 18 become 3 groups, filled by stride
    (l0, l4, l8 … / l1, l5, l9 … / l2, l6, l10 …) so that every pipeline stage has part of each
    group. The rarer type gives the size, unless the other has fewer than 1.25 times as many: 13
    and 12 become two groups of 13 places, one of them empty (a padding layer).
    """
    layers_of_type: dict[AttentionSpec, list[str]] = {}  # in order of first appearance
    for name, spec in specs.items():
        layers_of_type.setdefault(spec, []).append(name)
    counts = [len(layers) for layers in layers_of_type.values()]
    group_size = max(counts) if max(counts) < min(counts) * 1.25 else min(counts)
    groups = []
    for spec, layers in layers_of_type.items():
        num_groups = -(-len(layers) // group_size)
        groups += [KVCacheGroupSpec(tuple(layers[i::num_groups]), spec) for i in range(num_groups)]
    return tuple(groups)
