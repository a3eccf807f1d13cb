"""Write this step's keys and values into the paged cache (vllm ``reshape_and_cache_flash``).

The cache of one layer is [2, num_blocks, block_size, num_kv_heads, head_size]: keys, then values.
Slot s is offset s % block_size of block s // block_size; slot -1 is padding and writes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagedlab.kernels.jit import How, kernel

if TYPE_CHECKING:
    import triton.language as tl  # at run time the first use of a kernel puts it here, see jit.kernel

WRITE_LOG_COLUMNS = ("token", "slot", "block_id", "offset", "checksum")
TILE = 1024  # elements that one iteration of the kernel copies


def new_write_log(num_tokens: int, device: torch.device) -> Tensor:
    """A log for one launch: row i is written when token i is, and stays -1 when it is skipped."""
    return torch.full((num_tokens, len(WRITE_LOG_COLUMNS)), -1, dtype=torch.int64, device=device)


def write_log_columns(log: Tensor) -> dict[str, list[int]]:
    """The rows that were written, as the parallel lists of a ``kv_written`` event."""
    columns = log[log[:, 0] >= 0].T.tolist()
    return dict(zip(WRITE_LOG_COLUMNS, columns, strict=True))


def check_slots(slot_mapping: Tensor, num_slots: int) -> bool:
    """Refuse a slot that the cache does not have, before anything is written; say whether there is padding.

    Raises:
        IndexError: a slot is below -1 or at least ``num_slots``.
    """
    if slot_mapping.numel() == 0:
        return False
    least, most = (int(bound) for bound in torch.aminmax(slot_mapping))
    if least < -1 or most >= num_slots:
        wrong = least if least < -1 else most
        raise IndexError(f"slot {wrong} is outside the cache, whose slots are 0 to {num_slots - 1} (-1 for padding).")
    return least < 0


def reshape_and_cache_reference(
    key: Tensor,                # [T, num_kv_heads, head_size]
    value: Tensor,              # [T, num_kv_heads, head_size]
    kv_cache: Tensor,           # [2, num_blocks, block_size, num_kv_heads, head_size], written in place
    slot_mapping: Tensor,       # [T] int64   token -> slot, -1 for padding
    log: Tensor | None = None,  # [T, 5] int64, see WRITE_LOG_COLUMNS; filled if given
) -> None:
    """The torch twin, and what runs on a CPU.

    With block_size 4, slot 29 is offset 1 of block 7: ``kv_cache[0, 7, 1]`` takes that token's key.

    Raises:
        IndexError: a slot is outside the cache; nothing is written.
    """
    num_blocks, block_size = kv_cache.shape[1:3]
    token = None
    if check_slots(slot_mapping, num_blocks * block_size):
        token = (slot_mapping >= 0).nonzero().flatten()  # the tokens that are no padding
        slot_mapping, key, value = slot_mapping[token], key[token], value[token]
    block_id = slot_mapping // block_size  # [written tokens] int64
    offset = slot_mapping % block_size     # [written tokens] int64
    kv_cache[0].index_put_((block_id, offset), key)
    kv_cache[1].index_put_((block_id, offset), value)
    if log is not None:
        token = torch.arange(len(slot_mapping), device=slot_mapping.device) if token is None else token
        checksum = (_bit_sums(kv_cache[0, block_id, offset]) + _bit_sums(kv_cache[1, block_id, offset])) % 2**32
        log[token] = torch.stack([token, slot_mapping, block_id, offset, checksum], dim=1)


def _bit_sums(x: Tensor) -> Tensor:
    """Per token the sum of its elements' raw bits, read as unsigned integers.

    Two float16 ones have bits 0x3c00 each and give 30720.
    """
    as_int = torch.int32 if x.element_size() == 4 else torch.int16
    mask = 0xFFFF_FFFF if x.element_size() == 4 else 0xFFFF
    return (x.contiguous().view(as_int).to(torch.int64) & mask).flatten(1).sum(1)


def reshape_and_cache(
    key: Tensor,                # [T, num_kv_heads, head_size], any stride
    value: Tensor,              # [T, num_kv_heads, head_size], any stride
    kv_cache: Tensor,           # [2, num_blocks, block_size, num_kv_heads, head_size], any stride
    slot_mapping: Tensor,       # [T] int64
    how: How,
    log: Tensor | None = None,  # [T, 5] int64
) -> tuple[int, ...]:           # the grid
    """Launch the kernel, one program per token; what it does is what the twin above does.

    On a GPU a slot outside the cache is skipped, as looking for one would wait for the device.

    Raises:
        IndexError: a slot is outside the cache and the kernel is interpreted.
    """
    num_tokens, num_heads, head_size = key.shape
    num_blocks, block_size = kv_cache.shape[1:3]
    if how == "interpreted":
        check_slots(slot_mapping, num_blocks * block_size)
    grid = (num_tokens,)
    if num_tokens:
        kernel(reshape_and_cache_kernel, how)[grid](
            key, value, kv_cache[0], kv_cache[1], slot_mapping, slot_mapping if log is None else log,
            num_blocks * block_size, block_size, *key.stride(), *value.stride(), *kv_cache.stride()[1:],
            NUM_HEADS=num_heads, HEAD_SIZE=head_size, TILE=TILE, LOG=log is not None,
        )  # fmt: skip
    return grid


def reshape_and_cache_kernel(  # type: ignore[no-untyped-def]
    key, value,                    # [T, NUM_HEADS, HEAD_SIZE]
    key_cache, value_cache,        # [num_blocks, block_size, NUM_HEADS, HEAD_SIZE]
    slot_mapping,                  # [T] int64
    log,                           # [T, 5] int64, only with LOG
    num_slots, block_size,
    key_stride_t, key_stride_h, key_stride_d,
    value_stride_t, value_stride_h, value_stride_d,
    cache_stride_block, cache_stride_offset, cache_stride_h, cache_stride_d,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    LOG: tl.constexpr,
):
    """One program copies one token's key and value, TILE elements at a time."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if (slot >= 0) & (slot < num_slots):
        block_id = slot // block_size
        offset = slot % block_size
        to = block_id * cache_stride_block + offset * cache_stride_offset
        if LOG:
            checksum = tl.full((TILE,), 0, tl.int64)
        for first in range(0, NUM_HEADS * HEAD_SIZE, TILE):
            element = first + tl.arange(0, TILE)
            mask = element < NUM_HEADS * HEAD_SIZE
            head = (element // HEAD_SIZE).to(tl.int64)
            dim = (element % HEAD_SIZE).to(tl.int64)
            from_k = token * key_stride_t + head * key_stride_h + dim * key_stride_d
            from_v = token * value_stride_t + head * value_stride_h + dim * value_stride_d
            k = tl.load(key + from_k, mask=mask, other=0)
            v = tl.load(value + from_v, mask=mask, other=0)
            place = to + head * cache_stride_h + dim * cache_stride_d
            tl.store(key_cache + place, k, mask=mask)
            tl.store(value_cache + place, v, mask=mask)
            if LOG:
                if k.dtype.primitive_bitwidth == 32:
                    checksum += k.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
                    checksum += v.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
                else:
                    checksum += k.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
                    checksum += v.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
        if LOG:
            row = log + token * 5
            tl.store(row, token)
            tl.store(row + 1, slot)
            tl.store(row + 2, block_id)
            tl.store(row + 3, offset)
            # not tl.sum: it runs interpreted only if TRITON_INTERPRET was set before triton was imported
            tl.store(row + 4, tl.reduce(checksum, 0, tl.standard._sum_combine) & 0xFFFFFFFF)
