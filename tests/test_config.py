"""Every knob is checked where it is set, in one sentence that says what to do, and never changes afterwards."""

from __future__ import annotations

import dataclasses
import math

import pytest

from pagedlab.config import EngineConfig, SchedulerConfig
from pagedlab.errors import UserError
from pagedlab.sampling_params import SamplingParams


def complaint(make, **fields):
    with pytest.raises(UserError) as error:
        make(**fields)
    text = str(error.value)
    assert "\n" not in text and text.endswith(".")
    return text


POSITIVE = ("block_size", "num_blocks", "kv_cache_memory", "max_model_len", "max_num_seqs", "max_num_batched_tokens")


@pytest.mark.parametrize("name", POSITIVE)
@pytest.mark.parametrize("value", [0, -1, 1.5, "16", True, math.nan])
def test_a_count_that_is_not_a_positive_whole_number_is_refused(name, value):
    assert complaint(EngineConfig, **{name: value}) == f"{name} is {value!r}: give a positive whole number."


@pytest.mark.parametrize("name", POSITIVE)
def test_a_count_beyond_what_the_tables_hold_is_refused(name):
    most = 2**63 - 1 if name == "kv_cache_memory" else 2**31 - 1
    assert getattr(EngineConfig(**{name: most}), name) == most
    assert complaint(EngineConfig, **{name: most + 1}) == f"{name} is {most + 1}: give at most {most}."


@pytest.mark.parametrize("make", [EngineConfig, SamplingParams])
def test_a_seed_is_one_that_torch_takes(make):
    assert make(seed=2**63 - 1).seed == 2**63 - 1
    assert complaint(make, seed=2**63) == f"seed is {2**63}: give at most {2**63 - 1}."


@pytest.mark.parametrize("name", ["num_blocks", "kv_cache_memory", "max_model_len"])
def test_none_leaves_the_count_to_the_start(name):
    assert getattr(EngineConfig(**{name: None}), name) is None


def test_one_block_is_refused_because_it_is_the_null_block():
    assert complaint(EngineConfig, num_blocks=1) == (
        "num_blocks is 1: block 0 is the null block and holds no tokens, so give at least 2."
    )
    assert EngineConfig(num_blocks=2).num_blocks == 2


@pytest.mark.parametrize("name, value, choices", [
    ("device", "tpu", "auto, cpu, cuda"),
    ("dtype", "float64", "auto, float32, bfloat16, float16"),
    ("attention_backend", "flash", "auto, torch, triton, flash-attn"),
    ("runner", "", "persistent, state-table"),
])  # fmt: skip
def test_an_unknown_choice_lists_the_known_ones(name, value, choices):
    assert complaint(EngineConfig, **{name: value}) == f"{name} is {value!r}: choose one of {choices}."


@pytest.mark.parametrize("value", [0, -0.1, 1.01, math.inf, math.nan])
def test_the_gpu_share_is_above_0_and_at_most_1(value):
    assert "give a number above 0 and at most 1" in complaint(EngineConfig, gpu_memory_utilization=value)


@pytest.mark.parametrize("value", [None, "half", True])
def test_a_gpu_share_that_is_no_number_is_refused(value):
    assert "give a number above 0 and at most 1" in complaint(EngineConfig, gpu_memory_utilization=value)


@pytest.mark.parametrize("value", [-1, 2.0, "8", True, None])
def test_the_threshold_is_0_or_a_positive_whole_number(value):
    text = complaint(SchedulerConfig, long_prefill_token_threshold=value)
    assert text == (
        f"long_prefill_token_threshold is {value!r}: give 0 to switch it off or a positive whole number."
    )
    complaint(EngineConfig, long_prefill_token_threshold=value)


@pytest.mark.parametrize("name", ["enable_prefix_caching", "enable_chunked_prefill", "enforce_eager"])
@pytest.mark.parametrize("value", [None, 0, "no"])
def test_a_switch_is_true_or_false(name, value):
    assert complaint(EngineConfig, **{name: value}) == f"{name} is {value!r}: give True or False."


@pytest.mark.parametrize("value", [-1, 1.0, "x", True, None])
def test_the_engines_seed_is_a_whole_number(value):
    assert complaint(EngineConfig, seed=value) == f"seed is {value!r}: give a whole number of 0 or more."


@pytest.mark.parametrize("value", [None, 3, "lifo"])
def test_a_policy_is_checked_where_it_is_set(value):
    assert complaint(EngineConfig, policy=value).startswith(f"policy is {value!r}: choose fcfs, priority or ")


def test_a_model_is_text_or_none():
    assert complaint(EngineConfig, model=3) == "model is 3: give a directory or a hub id as text, or nothing."


@pytest.mark.parametrize("make", [EngineConfig, SchedulerConfig, SamplingParams])
def test_a_configuration_cannot_be_changed_afterwards(make):
    made = make()
    for field in dataclasses.fields(made):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field.name, 1)


def test_the_schedulers_part_carries_every_field_over():
    changed = EngineConfig(max_num_seqs=3, max_num_batched_tokens=5, enable_chunked_prefill=False,
                           long_prefill_token_threshold=2, policy="priority")
    part = changed.scheduler_config(77)
    assert dataclasses.asdict(part) == {
        "max_num_seqs": 3, "max_num_batched_tokens": 5, "max_model_len": 77, "enable_chunked_prefill": False,
        "long_prefill_token_threshold": 2, "policy": "priority",
    }  # fmt: skip


def test_the_defaults_are_those_of_the_contract():
    config = EngineConfig()
    assert (config.block_size, config.runner, config.dtype, config.policy) == (16, "persistent", "auto", "fcfs")
    assert config.enable_prefix_caching and config.enable_chunked_prefill and config.model is None
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.ignore_eos) == (16, 0, None, False)
    assert (params.stop, params.stop_token_ids, params.logprobs, params.prompt_logprobs) == ((), (), None, None)


# ------------------------------------------------------------------ sampling parameters


@pytest.mark.parametrize("fields, text", [
    ({"n": 0}, "n is 0: give a whole number of 1 or more."),
    ({"n": 100_000_000}, "n is 100000000: give at most 16384."),
    ({"n": True}, "n is True: give a whole number of 1 or more."),
    ({"max_tokens": 0}, "max_tokens is 0: give a whole number of 1 or more."),
    ({"max_tokens": -3}, "max_tokens is -3: give a whole number of 1 or more."),
    ({"max_tokens": 2.0}, "max_tokens is 2.0: give a whole number of 1 or more."),
    ({"min_tokens": -1}, "min_tokens is -1: give a whole number of 0 or more."),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5 but max_tokens is 4: lower the first or raise the second."),
    ({"seed": -1}, "seed is -1: give a whole number of 0 or more."),
    ({"seed": 0.5}, "seed is 0.5: give a whole number of 0 or more."),
    ({"logprobs": -1}, "logprobs is -1: give a whole number of 0 or more."),
    ({"prompt_logprobs": True}, "prompt_logprobs is True: give a whole number of 0 or more."),
    ({"temperature": -0.1}, "temperature is -0.1: give a number of 0 or more."),
    ({"temperature": math.inf}, "temperature is inf: give a number of 0 or more."),
    ({"temperature": math.nan}, "temperature is nan: give a number of 0 or more."),
    ({"temperature": "hot"}, "temperature is 'hot': give a number of 0 or more."),
    ({"temperature": True}, "temperature is True: give a number of 0 or more."),
    ({"top_p": 1.1}, "top_p is 1.1: give a number from 0 to 1."),
    ({"top_p": 0}, "top_p is 0: give a number above 0 and at most 1."),
    ({"min_p": 2}, "min_p is 2: give a number from 0 to 1."),
    ({"top_k": -2}, "top_k is -2: give 0 (or -1) to keep all tokens, or a positive whole number."),
    ({"top_k": 1.0}, "top_k is 1.0: give 0 (or -1) to keep all tokens, or a positive whole number."),
    ({"stop": [""]}, "a stop string is empty or not text: give non-empty strings."),
    ({"stop": ""}, "a stop string is empty or not text: give non-empty strings."),
    ({"stop": [3]}, "a stop string is empty or not text: give non-empty strings."),
    ({"stop": 3}, "stop is 3: give a list."),
    ({"stop_token_ids": [-1]}, "stop_token_ids must be whole numbers of 0 or more."),
    ({"stop_token_ids": ["a"]}, "stop_token_ids must be whole numbers of 0 or more."),
    ({"stop_token_ids": 7}, "stop_token_ids is 7: give a list."),
])
def test_a_sampling_parameter_out_of_range_says_what_to_give(fields, text):
    assert complaint(SamplingParams, **fields) == text


@pytest.mark.parametrize("fields", [
    {"temperature": 0}, {"top_k": -1}, {"top_k": 5}, {"top_p": 1e-9}, {"min_p": 1}, {"max_tokens": None},
    {"min_tokens": 4, "max_tokens": 4}, {"min_tokens": 99, "max_tokens": None}, {"seed": 0}, {"logprobs": 0},
])  # fmt: skip
def test_a_sampling_parameter_at_its_limit_is_taken(fields):
    made = SamplingParams(**fields)
    assert all(getattr(made, name) == value for name, value in fields.items())


@pytest.mark.parametrize("name", ["ignore_eos", "include_stop_str_in_output", "skip_special_tokens"])
@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_a_switch_of_a_request_is_true_or_false(name, value):
    assert complaint(SamplingParams, **{name: value}) == f"{name} is {value!r}: give True or False."


def test_no_stop_may_be_written_as_none():
    params = SamplingParams(stop=None, stop_token_ids=None)
    assert params == SamplingParams() and params.stop == params.stop_token_ids == ()


def test_one_stop_string_may_be_given_as_it_is():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[1, 2]).stop_token_ids == (1, 2)


def test_only_prompt_logprobs_keep_a_request_from_reading_the_prefix_cache():
    assert SamplingParams(prompt_logprobs=0).skip_reading_prefix_cache
    assert not SamplingParams(logprobs=5).skip_reading_prefix_cache
