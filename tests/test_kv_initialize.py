"""KV-cache initialization: recorded cases of the real functions, worked numbers, and the engine's stricter guard."""

import copy
import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedlab.conformance.kv_init import compute_case, replay_kv_init
from pagedlab.errors import UserError
from pagedlab.kv.grouping import UnequalPages, get_kv_cache_groups
from pagedlab.kv.initialize import (
    NotEnoughMemory,
    bytes_per_block,
    get_kv_cache_config,
    initialization_events,
    resolve_max_model_len,
)
from pagedlab.kv.several_workers import InconsistentWorkers, checked_need_bytes, get_kv_cache_configs
from pagedlab.kv.specs import AttentionSpec
from pagedlab.trace.events import KvConfig, KvMemory, KvSpec

RECORDING = Path(__file__).parent / "data/conformance/kv_init.json.gz"  # real vLLM 0.14.1 functions, 30 cases
DOCUMENT = json.loads(gzip.decompress(RECORDING.read_bytes()))
GIB = 2**30
FULL = AttentionSpec(16, 8, 128, "bfloat16")
WINDOW = AttentionSpec(16, 8, 128, "bfloat16", sliding_window=1024)


def layers(pattern: str, count: int) -> dict[str, AttentionSpec]:
    return {f"l{i}": FULL if pattern[i % len(pattern)] == "F" else WINDOW for i in range(count)}


@pytest.mark.parametrize("case", DOCUMENT["cases"], ids=lambda case: case["name"])
def test_recorded_case_is_reproduced_in_every_field(case):
    outcome = replay_kv_init({"cases": [case]}, "kv_init.json")[0]
    assert outcome.ok, outcome.report


@pytest.mark.parametrize(
    ("case", "path"),
    [
        ("hybrid_6_full_18_sw", ("checked_need_bytes",)),
        ("hybrid_6_full_18_sw", ("workers", 0, "tensors", 3, "shared_by", 1)),
        ("full_with_unequal_heads", ("groups", 0, "page_size_bytes_by_layer", "l1")),
        ("too_little_memory", ("error", "estimated_max_model_len")),
        ("hybrid_pages_do_not_divide", ("error", "type")),
        ("two_workers_unequal_memory", ("max_concurrency",)),
    ],
)
def test_a_changed_recording_is_found_and_named(case, path):
    case = copy.deepcopy(next(c for c in DOCUMENT["cases"] if c["name"] == case))
    place = case
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = "other" if isinstance(place[path[-1]], str) else place[path[-1]] + 1
    outcome = replay_kv_init({"cases": [case]}, "kv_init.json")[0]
    assert not outcome.ok
    named = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")
    assert outcome.first_difference["field"] == named and named in outcome.report


def test_qwen3_0_6b_needs_65536_bytes_per_layer_and_block_and_10_gib_hold_5851_blocks():
    groups = get_kv_cache_groups(layers("F", 28))
    assert FULL.page_size_bytes == 65_536
    assert get_kv_cache_config(groups, 10 * GIB).num_blocks == 5_851
    assert (get_kv_cache_config(groups, GIB).num_blocks, bytes_per_block(groups)) == (585, 1_835_008)


def test_6_full_and_18_window_layers_become_4_groups_and_6_shared_buffers():
    config = get_kv_cache_config(get_kv_cache_groups(layers("SSSF", 24)), GIB)
    assert (len(config.kv_cache_groups), len(config.kv_cache_tensors), config.num_blocks) == (4, 6, 2_730)
    assert config.kv_cache_tensors[0].shared_by == ("l0", "l1", "l2", "l3")
    assert config.kv_cache_groups[0].layer_names == ("l0", "l4", "l8", "l12", "l16", "l20")


def test_unequal_pages_in_two_pipeline_stages_are_counted_with_the_whole_models_bytes_as_in_0_14_1():
    small = AttentionSpec(16, 4, 128, "bfloat16")
    stages = [{"l0": FULL, "l1": small}, {"l2": FULL, "l3": small}]
    configs = get_kv_cache_configs(stages, [GIB, GIB], max_model_len=2048)
    assert configs[0].num_blocks == GIB // (2 * 65_536 + 2 * 32_768)
    assert [t.shared_by for t in configs[1].kv_cache_tensors] == [("l2",), ("l3",)]


def test_manager_off_without_a_full_layer_is_refused():
    specs = {"l0": WINDOW, "l1": AttentionSpec(16, 8, 128, "bfloat16", sliding_window=512)}
    with pytest.raises(UserError, match="several attention types"):
        get_kv_cache_groups(specs, disable_hybrid_kv_cache_manager=True)


def test_manager_off_with_two_windows_beside_full_layers_is_refused():
    specs = {"l0": FULL, "l1": WINDOW, "l2": AttentionSpec(16, 8, 128, "bfloat16", sliding_window=512)}
    with pytest.raises(UserError, match=r"\[512, 1024\]"):
        get_kv_cache_groups(specs, disable_hybrid_kv_cache_manager=True)


def test_workers_that_disagree_about_a_layer_are_refused():
    with pytest.raises(InconsistentWorkers, match="l0"):
        get_kv_cache_configs([{"l0": FULL}, {"l0": WINDOW}], [GIB, GIB], max_model_len=64)


@pytest.mark.parametrize("num_kv_heads, in_vllm", [(8, AssertionError), (4, ZeroDivisionError)])
def test_a_worker_without_a_layer_is_refused(num_kv_heads, in_vllm):
    """Of a shape and of another: equal pages, and unequal ones."""
    stages = [{"l0": FULL, "l1": AttentionSpec(16, num_kv_heads, 128, "bfloat16")}, {}]
    with pytest.raises(in_vllm, match="no layer"):
        get_kv_cache_configs(stages, [GIB, GIB], max_model_len=64)


def test_pages_that_do_not_divide_name_both_sizes():
    with pytest.raises(UnequalPages, match=r"24,576.*65,536"):
        get_kv_cache_groups({"l0": FULL, "l1": AttentionSpec(16, 3, 128, "bfloat16", sliding_window=64)})


# ------------------------------------------------------------------ the engine's own guard


def resolve(specs, num_bytes, max_model_len, model_max_len=40_960, num_blocks=None, budget=2048):
    return resolve_max_model_len(
        get_kv_cache_config(get_kv_cache_groups(specs), num_bytes, num_blocks), num_bytes,
        max_model_len=max_model_len, model_max_len=model_max_len, max_num_batched_tokens=budget,
        num_blocks_given=num_blocks is not None,
    )  # fmt: skip


def test_exactly_enough_bytes_passes_0_14_1_and_is_refused_here_because_of_the_null_block():
    specs = layers("F", 28)
    get_kv_cache_configs([specs], [128 * 1_835_008], max_model_len=2048)
    with pytest.raises(NotEnoughMemory, match=r"needs 128 blocks, .* hold 127 usable"):
        resolve(specs, 128 * 1_835_008, 2048)
    assert resolve(specs, 129 * 1_835_008, 2048) == (2048, None)


def test_memory_for_the_null_block_or_less_holds_no_usable_block():
    for num_bytes in (0, 1_835_008):
        with pytest.raises(NotEnoughMemory, match=r"hold 0 usable blocks .*: give at least 3670016 bytes") as caught:
            resolve(layers("F", 28), num_bytes, 16)
        assert caught.value.fitting_max_model_len == 0


def test_first_group_only_passes_0_14_1_and_is_refused_here_because_every_group_counts():
    specs = layers("SSSF", 24)
    groups = get_kv_cache_groups(specs)
    assert checked_need_bytes(groups, 2048, 2048) == 50_724_864
    get_kv_cache_configs([specs], [60_000_000], max_model_len=2048)
    with pytest.raises(NotEnoughMemory, match="151 usable") as caught:
        resolve(specs, 60_000_000, 2048)
    fitting = caught.value.fitting_max_model_len
    assert resolve(specs, 60_000_000, fitting) == (fitting, None)
    with pytest.raises(NotEnoughMemory):
        resolve(specs, 60_000_000, fitting + 1)


def test_the_models_own_limit_is_refused_when_memory_does_not_hold_it_and_the_advice_works():
    specs = layers("F", 28)
    with pytest.raises(NotEnoughMemory) as caught:
        resolve(specs, GIB, None)
    assert "give max_model_len 9344 or less, or at least 4699455488 bytes" in str(caught.value)
    assert resolve(specs, 4_699_455_488, None) == (40_960, None)


def test_blocks_given_by_hand_make_an_unset_length_what_the_usable_blocks_hold():
    assert resolve(layers("F", 28), 0, None, num_blocks=8) == (112, None)
    assert resolve(layers("F", 28), 0, None, model_max_len=100, num_blocks=8) == (100, None)


def test_blocks_given_by_hand_warn_about_a_longer_length():
    length, warning = resolve(layers("F", 28), 0, 113, num_blocks=8)
    assert length == 113
    assert "needs 8 blocks and 7 are usable" in warning and "longer than 112" in warning


def test_too_few_blocks_for_all_groups_are_refused():
    with pytest.raises(NotEnoughMemory, match="at least 5"):
        resolve(layers("SSSF", 24), 0, None, num_blocks=4)


def test_a_length_beyond_the_models_limit_is_refused():
    with pytest.raises(UserError, match="own limit is 1,000"):
        resolve(layers("F", 2), GIB, 1001, model_max_len=1000)


@given(
    pattern=st.text("FS", min_size=1, max_size=8), count=st.integers(1, 12), num_blocks=st.integers(2, 200),
    budget=st.integers(1, 300),
)  # fmt: skip
def test_the_resolved_length_fits_and_the_next_one_does_not(pattern, count, num_blocks, budget):
    short = AttentionSpec(16, 8, 128, "bfloat16", sliding_window=40)
    specs = {name: short if spec == WINDOW else spec for name, spec in layers(pattern, count).items()}
    groups = get_kv_cache_groups(specs)
    try:
        length, _ = resolve(specs, 0, None, num_blocks=num_blocks, budget=budget)
    except NotEnoughMemory:
        assert num_blocks - 1 < len(groups)
        return
    most = [min(-(-length // 16), g.kv_cache_spec.max_blocks(length, budget)) for g in groups]
    assert sum(most) <= num_blocks - 1
    if length < 40_960:
        with pytest.raises(NotEnoughMemory):
            resolve(specs, num_blocks * bytes_per_block(groups), length + 1, budget=budget)


# ------------------------------------------------------------------ grouping as a mapping


@given(pattern=st.text("FS", min_size=1, max_size=10), count=st.integers(1, 40), num_bytes=st.integers(0, 2**34))
def test_every_layer_has_one_group_one_buffer_and_no_two_layers_of_a_group_share_one(pattern, count, num_bytes):
    specs = layers(pattern, count)
    config = get_kv_cache_config(get_kv_cache_groups(specs), num_bytes)
    grouped = [name for group in config.kv_cache_groups for name in group.layer_names]
    buffered = [name for tensor in config.kv_cache_tensors for name in tensor.shared_by]
    assert sorted(grouped) == sorted(buffered) == sorted(specs)
    for group in config.kv_cache_groups:
        assert {specs[name] for name in group.layer_names} == {group.kv_cache_spec}
        assert all(len(set(tensor.shared_by) & set(group.layer_names)) <= 1 for tensor in config.kv_cache_tensors)
    assert sum(tensor.size for tensor in config.kv_cache_tensors) <= num_bytes


# ------------------------------------------------------------------ events


def test_the_events_say_what_each_layer_needs_and_what_came_out():
    specs = layers("SSSF", 24)
    config = get_kv_cache_config(get_kv_cache_groups(specs), GIB)
    *each, memory, said = initialization_events(specs, config, GIB, "stated", {"kv_cache_memory": GIB}, 2048)
    assert all(isinstance(e, KvSpec) for e in each)
    assert [e.layer for e in each] == [f"l{i}" for i in range(24)] and each[0].page_bytes == 65_536
    assert isinstance(memory, KvMemory) and (memory.available_bytes, memory.terms) == (GIB, {"kv_cache_memory": GIB})
    assert isinstance(said, KvConfig) and said.max_model_len == 2048
    assert (said.num_blocks, said.bytes_per_block, len(said.groups), len(said.tensors)) == (2_730, 393_216, 4, 6)


def test_a_case_with_an_unknown_dtype_is_refused_in_one_sentence():
    inputs = copy.deepcopy(DOCUMENT["cases"][0]["input"])
    inputs["specs"]["A"]["dtype"] = "int3"
    with pytest.raises(UserError, match="int3"):
        compute_case(inputs)


def test_a_document_without_cases_is_refused():
    with pytest.raises(UserError, match="no list of cases"):
        replay_kv_init({"cases": []}, "x.json")
