"""Keys and values land in their slots and nowhere else, by kernel and twin alike."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedlab.kernels.reshape_and_cache import (
    new_write_log,
    reshape_and_cache,
    reshape_and_cache_reference,
    write_log_columns,
)


def interpreted(key, value, kv_cache, slot_mapping, log=None):
    pytest.importorskip("triton")
    reshape_and_cache(key, value, kv_cache, slot_mapping, "interpreted", log)


both = pytest.mark.parametrize("write", [reshape_and_cache_reference, interpreted], ids=["torch", "interpreted"])


def random_case(seed, num_tokens, num_blocks, block_size, heads, size, dtype):
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, num_tokens, heads, size, generator=generator).to(dtype)
    cache = torch.randn(2, num_blocks, block_size, heads, size, generator=generator).to(dtype)
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
    return key, value, cache, slots


@both
def test_only_the_given_slots_change_and_padding_writes_nothing(write):
    cache = torch.zeros(2, 6, 4, 1, 8)
    rows = torch.arange(1.0, 5.0)[:, None, None].expand(4, 1, 8)
    write(rows, -rows, cache, torch.tensor([5, -1, -1, 17]))
    changed = cache.abs().sum((-1, -2)).flatten(1).nonzero().tolist()
    assert changed == [[0, 5], [0, 17], [1, 5], [1, 17]]
    assert cache[0, 1, 1].eq(1).all() and cache[1, 4, 1].eq(-4).all()


@both
@pytest.mark.parametrize("slot", [24, 2**40, -2])
def test_a_slot_outside_the_cache_is_refused_and_nothing_written(write, slot):
    cache = torch.zeros(2, 6, 4, 1, 8)
    with pytest.raises(IndexError, match=f"slot {slot} is outside the cache, whose slots are 0 to 23"):
        write(torch.ones(3, 1, 8), torch.ones(3, 1, 8), cache, torch.tensor([3, slot, -1]))
    assert not cache.any()


@both
def test_a_batch_without_tokens_is_no_launch(write):
    write(torch.zeros(0, 1, 8), torch.zeros(0, 1, 8), torch.zeros(2, 2, 4, 1, 8), torch.zeros(0, dtype=torch.int64))


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_log_says_what_was_written_with_a_checksum_of_its_bits(write, dtype):
    key, value, cache, _ = random_case(0, 4, 6, 4, 2, 24, dtype)
    log = new_write_log(4, key.device)
    write(key, value, cache, torch.tensor([5, -1, 17, 0]), log)
    columns = write_log_columns(log)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    width = 32 if dtype == torch.float32 else 16
    sums = [
        sum(int(b) % 2**width for t in (key, value) for b in t[token].contiguous().view(bits).flatten()) % 2**32
        for token in (0, 2, 3)
    ]
    assert columns == {
        "token": [0, 2, 3], "slot": [5, 17, 0], "block_id": [1, 4, 0], "offset": [1, 1, 0], "checksum": sums
    }


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 99), num_tokens=st.integers(1, 9), block_size=st.sampled_from([1, 3, 8, 16]),
    heads=st.integers(1, 5), size=st.sampled_from([1, 20, 64, 80, 256]), pad=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), transposed=st.booleans(),
)
def test_kernel_and_twin_leave_the_same_bits(seed, num_tokens, block_size, heads, size, pad, dtype, transposed):
    key, value, cache, slots = random_case(seed, num_tokens, num_tokens + 2, block_size, heads, size, dtype)
    slots[torch.randperm(num_tokens)[:pad]] = -1
    if transposed:  # strides of a key that was cut out of a merged projection, and of another cache layout
        key = torch.stack([key, value], dim=-1)[..., 0]
        cache = cache.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    twin = cache.clone()
    logs = [new_write_log(num_tokens, key.device) for _ in range(2)]
    interpreted(key, value, cache, slots, logs[0])
    reshape_and_cache_reference(key, value, twin, slots, logs[1])
    assert torch.equal(cache.view(torch.uint8) if cache.is_contiguous() else cache, twin.view(torch.uint8)
                       if cache.is_contiguous() else twin)
    assert torch.equal(*logs)


@both
def test_offsets_beyond_32_bits_reach_their_place(write):
    """Block 17 starts at element 17 · 2²⁷ > 2³¹ of a cache with wide strides; memory nobody touches costs nothing."""
    memory = torch.empty(18 * 2**27 + 64, dtype=torch.float16)
    cache = memory.as_strided((2, 18, 2, 1, 16), (32, 2**27, 16, 16, 1))
    key = torch.arange(16, dtype=torch.float16).view(1, 1, 16)
    write(key, -key, cache, torch.tensor([17 * 2 + 1]))
    start = 17 * 2**27 + 16
    assert torch.equal(memory[start : start + 16], key.flatten())
    assert torch.equal(memory[start + 32 : start + 48], -key.flatten())
