"""What our wrappers would launch on a GPU, compiled for one that is not there with the runtime's own specialisations.

Triton compiles a variant for arguments that are 1, for those that are multiples of 16, and for aligned addresses;
only a launch from real tensors says which variants there are.
"""

import pytest
import torch

pytest.importorskip("triton")

from kernel_compiler import Compiled, resources
from pagedlab.kernels.block_tables import gather_block_tables
from pagedlab.kernels.jit import PointerTable
from pagedlab.kernels.paged_attention import QueryTiles, longest_block_m, paged_attention
from pagedlab.kernels.reshape_and_cache import new_write_log, reshape_and_cache
from pagedlab.kernels.slot_mapping import compute_slot_mapping


def attend(rows, *, dtype=torch.bfloat16, block_size=16, num_heads=16, num_kv_heads=8, head_size=128, num_splits=1,
           window=None, log=False):
    """Launch attention for rows of (query_len, seq_len); what the tensors hold does not matter here."""
    query_lens = [query_len for query_len, _ in rows]
    num_columns = -(-max(seq_len for _, seq_len in rows) // block_size)
    query = torch.zeros(sum(query_lens), num_heads, head_size, dtype=dtype)
    block_table = torch.zeros(len(rows), num_columns, dtype=torch.int32)
    tiles = QueryTiles.cut(
        query_lens, num_heads // num_kv_heads, longest_block_m(head_size, dtype.itemsize), query.device
    )
    paged_attention(
        query, torch.zeros(2, 3, block_size, num_kv_heads, head_size, dtype=dtype), torch.empty_like(query), tiles,
        torch.zeros(len(rows) + 1, dtype=torch.int32), torch.zeros(len(rows), dtype=torch.int32), block_table,
        scale=0.1, sliding_window=window, num_splits=num_splits, how="compiled",
        reads=block_table.clone() if log else None,
    )  # fmt: skip


@pytest.mark.parametrize("arch", [80, 90])
def test_attention_of_every_kind_of_step_compiles_without_local_memory(arch, monkeypatch):
    compiled = Compiled(monkeypatch, arch)
    attend([(1, 40)])                                                        # one token: every size that may be 1 is
    attend([(1, 9)], block_size=16, num_heads=2, num_kv_heads=1)             # a table of one column
    attend([(1, 40), (1, 7), (1, 5)], block_size=1)
    attend([(1, 700)] * 2, num_splits=16)
    attend([(5, 9), (1, 30)], dtype=torch.float32, head_size=32, num_heads=4, num_kv_heads=2, block_size=4)
    attend([(33, 50), (1, 30)], head_size=80, window=20)
    attend([(33, 50), (1, 30)], num_heads=32, num_kv_heads=4, log=True)
    kernels = compiled.variants("paged_attention_kernel") + compiled.variants("combine_splits_kernel")
    assert len(kernels) == 8
    assert [usage for usage in map(resources, kernels) if usage["STACK"] or usage["LOCAL"]] == []


@pytest.mark.parametrize("arch", [80, 90])
def test_writes_and_index_maps_compile_without_local_memory(arch, monkeypatch):
    compiled = Compiled(monkeypatch, arch)
    heads = torch.zeros(5, 4, 128, dtype=torch.bfloat16)  # two query heads, a key head, a value head
    for num_tokens, block_size in ((5, 16), (1, 1)):
        cache = torch.zeros(2, 3, block_size, 1, 128, dtype=torch.bfloat16)
        for log in (None, new_write_log(num_tokens, heads.device)):
            key, value = heads[:num_tokens, 2:3], heads[:num_tokens, 3:]
            reshape_and_cache(key, value, cache, torch.zeros(num_tokens, dtype=torch.int64), "compiled", log)
    for num_groups, num_columns, num_tokens in ((1, 1, 1), (2, 7, 33)):
        tables = PointerTable.of([torch.zeros(3, num_columns, dtype=torch.int32) for _ in range(num_groups)])
        counts = torch.zeros(num_groups, 3, dtype=torch.int32)
        gather_block_tables(tables, tables, counts, torch.zeros(2, dtype=torch.int32), "compiled")
        compute_slot_mapping(
            tables, [], torch.zeros(3, dtype=torch.int32), torch.zeros(num_tokens, dtype=torch.int64),
            torch.ones(num_groups, dtype=torch.int32), torch.zeros(num_groups, num_tokens, dtype=torch.int64),
            "compiled",
        )  # fmt: skip
    kernels = [kernel for name in compiled.functions for kernel in compiled.variants(name)]
    assert len(compiled.functions) == 3 and len(kernels) >= 7
    assert [usage for usage in map(resources, kernels) if usage["STACK"] or usage["LOCAL"]] == []


def test_number_of_tokens_makes_no_variants(monkeypatch):
    """Not in the numbers, and not in where the tiles lie: a new one would stop the engine for seconds."""
    compiled = Compiled(monkeypatch, 90)
    for num_rows in (1, 2, 3, 16):
        attend([(1, 700)] * num_rows, num_splits=4)
    assert [len(compiled.variants(name)) for name in compiled.functions] == [1, 1]
