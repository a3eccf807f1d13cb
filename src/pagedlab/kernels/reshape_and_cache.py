"""Write this step's keys and values into the paged cache (vllm ``reshape_and_cache_flash``).

The cache of one layer is [2, num_blocks, block_size, num_kv_heads, head_size]: keys, then values.
Slot s is offset s % block_size of block s // block_size; slot -1 is padding and writes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

WRITE_LOG_COLUMNS = ("token", "slot", "block_id", "offset", "checksum")


def new_write_log(num_tokens: int, device: torch.device) -> Tensor:
    """A log for one launch: row i is written when token i is, and stays -1 when it is skipped."""
    return torch.full((num_tokens, len(WRITE_LOG_COLUMNS)), -1, dtype=torch.int64, device=device)


def write_log_columns(log: Tensor) -> dict[str, list[int]]:
    """The rows that were written, as the parallel lists of a ``kv_written`` event."""
    columns = log[log[:, 0] >= 0].T.tolist()
    return dict(zip(WRITE_LOG_COLUMNS, columns, strict=True))


def check_slots(slot_mapping: Tensor, num_slots: int) -> None:
    """Refuse a slot that the cache does not have, before anything is written.

    Raises:
        IndexError: a slot is below -1 or at least ``num_slots``.
    """
    if slot_mapping.numel() == 0:
        return
    least, most = (int(bound) for bound in torch.aminmax(slot_mapping))
    if least < -1 or most >= num_slots:
        wrong = least if least < -1 else most
        raise IndexError(f"slot {wrong} is outside the cache, whose slots are 0 to {num_slots - 1} (-1 for padding).")


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
    check_slots(slot_mapping, num_blocks * block_size)
    token = torch.arange(slot_mapping.numel(), device=slot_mapping.device)
    if bool((slot_mapping < 0).any()):
        token = token[slot_mapping >= 0]
        slot_mapping, key, value = slot_mapping[token], key[token], value[token]
    block_id = slot_mapping // block_size  # [written tokens] int64
    offset = slot_mapping % block_size     # [written tokens] int64
    kv_cache[0].index_put_((block_id, offset), key)
    kv_cache[1].index_put_((block_id, offset), value)
    if log is not None:
        checksum = (_bit_sums(kv_cache[0, block_id, offset]) + _bit_sums(kv_cache[1, block_id, offset])) % 2**32
        log[token] = torch.stack([token, slot_mapping, block_id, offset, checksum], dim=1)


def _bit_sums(x: Tensor) -> Tensor:
    """Per token the sum of its elements' raw bits, read as unsigned integers.

    Two float16 ones have bits 0x3c00 each and give 30720.
    """
    as_int = torch.int32 if x.element_size() == 4 else torch.int16
    mask = 0xFFFF_FFFF if x.element_size() == 4 else 0xFFFF
    return (x.contiguous().view(as_int).to(torch.int64) & mask).flatten(1).sum(1)
