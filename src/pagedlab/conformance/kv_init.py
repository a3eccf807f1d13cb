"""Replays recordings of vLLM's KV-cache initialization: layer specs and bytes in, groups, blocks and buffers out."""

from __future__ import annotations

from typing import Any

from pagedlab.conformance.report import Outcome, Unreadable
from pagedlab.errors import UserError
from pagedlab.kv.grouping import UnequalPages, get_kv_cache_groups
from pagedlab.kv.initialize import NotEnoughMemory
from pagedlab.kv.several_workers import (
    checked_need_bytes,
    get_kv_cache_configs,
    max_concurrency,
    merge_specs,
    num_padding_layers,
    reported_cache_tokens,
)
from pagedlab.kv.specs import DTYPE_BYTES, AttentionSpec, KVCacheConfig, KVCacheGroupSpec

INPUTS = ("name", "about", "input")
OPTIONAL = ("sliding_window",)  # left out of a recording where it is null


def replay_kv_init(document: dict[str, Any], path: str) -> list[Outcome | Unreadable]:
    """Compare every recorded field of every case with what ours computes; a malformed case is named.

    Raises:
        UserError: the document is not a KV-initialization recording.
    """
    cases = document.get("cases")
    if not isinstance(cases, list) or not cases:
        raise UserError(f"{path} has no list of cases: it is not a KV-cache initialization recording.")
    return [_replay_case(case, path) for case in cases]


def _replay_case(case: Any, path: str) -> Outcome | Unreadable:
    if not isinstance(case, dict) or not isinstance(case.get("name"), str):
        return Unreadable(path, f"{path}: a case has no name.")
    expected = {key: value for key, value in case.items() if key not in INPUTS}
    try:
        got = compute_case(case["input"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return Unreadable(path, f"{path}: case {case['name']!r} has a malformed input ({error!r}).")
    except UserError as error:
        return Unreadable(path, f"{path}: case {case['name']!r}: {error}")
    if "error" in expected and "error" in got:  # says is a paraphrase; keep what can be compared
        expected = expected | {"error": {k: v for k, v in expected["error"].items() if k != "says"}}
        if "page_sizes" in expected["error"]:
            expected["error"]["page_sizes"] = sorted(set(expected["error"]["page_sizes"]), reverse=True)
        got = got | {"error": {k: v for k, v in got["error"].items() if k in expected["error"]}}
    difference = _first_difference(expected, got, "")
    if difference is None:
        return Outcome(case["name"], path, "kv_init", "strict", True, None, "", case.get("about", ""))
    field, want, have = difference
    report = (
        f"{case['name']}: {case.get('about', '')}\n"
        f"  field     {field}\n"
        f"  expected  {_shortened(want)}\n"
        f"  got       {_shortened(have)}\n"
    )
    first = {"step": None, "field": field, "expected": want, "got": have}
    return Outcome(case["name"], path, "kv_init", "strict", False, first, report, case.get("about", ""))


def compute_case(inputs: dict[str, Any]) -> dict[str, Any]:
    """What our initialization gives for one case, in the recordings' own words."""
    letters = {letter: _spec(spec) for letter, spec in inputs["specs"].items()}
    specs_by_worker = [{name: letters[letter] for name, letter in layers} for layers in inputs["layers_by_worker"]]
    lengths = (inputs["max_model_len"], inputs["max_num_batched_tokens"])
    disabled = inputs["disable_hybrid_kv_cache_manager"]
    out: dict[str, Any] = {}
    try:
        groups = get_kv_cache_groups(merge_specs(specs_by_worker), disable_hybrid_kv_cache_manager=disabled)
        out["checked_need_bytes"] = checked_need_bytes(groups, *lengths)
        configs = get_kv_cache_configs(
            specs_by_worker,
            inputs["available_bytes"],
            max_model_len=inputs["max_model_len"],
            max_num_batched_tokens=inputs["max_num_batched_tokens"],
            num_blocks_override=inputs["num_gpu_blocks_override"],
            disable_hybrid_kv_cache_manager=disabled,
        )
    except UserError as error:
        return out | {"error": _error(error)}
    return out | _describe_pool(configs) | _describe_limits(groups, configs[0], *lengths)


def _spec(spec: dict[str, Any]) -> AttentionSpec:
    if spec["dtype"] not in DTYPE_BYTES:
        raise UserError(f"a layer has the dtype {spec['dtype']!r}: known ones are {', '.join(DTYPE_BYTES)}.")
    window = spec.get("sliding_window")
    return AttentionSpec(
        block_size=spec["block_size"],
        num_kv_heads=spec["num_kv_heads"],
        head_size=spec["head_size"],
        dtype=spec["dtype"],
        sliding_window=window,
        keeps_all_blocks=spec["kind"] == "full" and window is not None,
    )


def _error(error: UserError) -> dict[str, Any]:
    """The exception in vLLM's terms: its type there, and the numbers."""
    if isinstance(error, UnequalPages):
        return {"type": "NotImplementedError", "page_sizes": error.page_sizes}
    for fault in (AssertionError, ZeroDivisionError):
        if isinstance(error, fault):
            return {"type": fault.__name__}
    fitting = error.fitting_max_model_len if isinstance(error, NotEnoughMemory) else 0
    return {"type": "ValueError"} | ({"estimated_max_model_len": fitting} if fitting else {})


def _describe_pool(configs: list[KVCacheConfig]) -> dict[str, Any]:
    first = configs[0]
    return {
        "num_blocks": first.num_blocks,
        "usable_blocks": first.num_blocks - 1,
        "groups": [_describe_group(group, first.num_blocks) for group in first.kv_cache_groups],
        "workers": [
            {
                "group_layer_names": [list(group.layer_names) for group in config.kv_cache_groups],
                "tensors": [{"size": t.size, "shared_by": list(t.shared_by)} for t in config.kv_cache_tensors],
                "total_bytes": sum(t.size for t in config.kv_cache_tensors),
            }
            for config in configs
        ],
    }


def _describe_group(group: KVCacheGroupSpec, num_blocks: int) -> dict[str, Any]:
    spec = group.kv_cache_spec
    window = {} if spec.sliding_window is None else {"sliding_window": spec.sliding_window}
    if not group.layer_specs:
        return {
            "kind": spec.kind,
            "block_size": spec.block_size,
            "page_size_bytes": spec.page_size_bytes,
            "kv_cache_shape": _shape(spec, num_blocks),
        } | window
    return {
        "kind": "uniform_type",
        "block_size": spec.block_size,
        "page_size_bytes": group.page_size_bytes,
        "page_size_bytes_by_layer": {name: s.page_size_bytes for name, s in group.layer_specs.items()},
        "kv_cache_shape_by_layer": {name: _shape(s, num_blocks) for name, s in group.layer_specs.items()},
        "scheduler_sees": {
            "kind": spec.kind,
            "block_size": spec.block_size,
            "num_kv_heads": spec.num_kv_heads,
            "head_size": spec.head_size,
            "dtype": spec.dtype,
            "page_size_bytes": spec.page_size_bytes,
        }
        | window,
    }


def _shape(spec: AttentionSpec, num_blocks: int) -> list[int]:
    """Keys and values, blocks, tokens, KV heads, head size."""
    return [2, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size]


def _describe_limits(
    groups: tuple[KVCacheGroupSpec, ...], config: KVCacheConfig, max_model_len: int, max_num_batched_tokens: int
) -> dict[str, Any]:
    if not groups:
        return {}
    needed = [group.kv_cache_spec.max_blocks(max_model_len, max_num_batched_tokens) for group in groups]
    return {
        "blocks_per_group_for_one_longest_request": needed,
        "longest_request_fits": sum(needed) <= config.num_blocks - 1,
        "max_concurrency": round(max_concurrency(config, max_model_len, max_num_batched_tokens), 4),
        "reported_cache_tokens": reported_cache_tokens(config),
        "padding_layers": num_padding_layers(groups),
        "coordinator": "UnitaryKVCacheCoordinator" if len(groups) == 1 else "HybridKVCacheCoordinator",
    }


def _first_difference(expected: Any, got: Any, where: str) -> tuple[str, Any, Any] | None:
    """The first recorded value that ours does not have, with its path such as ``groups[1].block_size``."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in [*expected, *(k for k in got if k not in expected and k not in OPTIONAL)]:
            place = f"{where}.{key}" if where else key
            if key not in expected or key not in got:
                return place, expected.get(key), got.get(key)
            if difference := _first_difference(expected[key], got[key], place):
                return difference
        return None
    if isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        for i, (want, have) in enumerate(zip(expected, got, strict=True)):
            if difference := _first_difference(want, have, f"{where}[{i}]"):
                return difference
        return None
    return None if type(expected) is type(got) and expected == got else (where, expected, got)


def _shortened(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 300 else text[:300] + " …"
