"""The index transforms: each against its definition, its kernel against its twin, and the way back."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedlab.kernels.block_tables import gather_block_tables, gather_block_tables_reference
from pagedlab.kernels.jit import PointerTable
from pagedlab.kernels.slot_mapping import compute_slot_mapping, compute_slot_mapping_reference, slot_chain
from pagedlab.sampling_params import SamplingParams
from pagedlab.worker.flat_indices import flatten_batch, token_indices
from pagedlab.worker.requests import CachedRequestState
from pagedlab.worker.staged import StagedTensor

HOWS = ["torch", "interpreted"]
NONSENSE = 2**31 - 1  # an id that no pool has: a stale entry that is read does not stay unnoticed


@pytest.fixture(params=HOWS)
def how(request):
    if request.param == "interpreted":
        pytest.importorskip("triton")
    return request.param


@st.composite
def batches(draw, max_reqs=5, max_groups=1):
    """(computed, new) per row, block sizes, and per group a table with a distinct id in every valid cell."""
    rows = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=max_reqs))
    block_sizes = draw(st.lists(st.sampled_from((1, 2, 3, 4, 16)), min_size=1, max_size=max_groups))
    max_model_len = draw(st.integers(40, 50))
    tables, num_blocks = [], []
    for block_size in block_sizes:
        counts = [-(-(computed + new) // block_size) for computed, new in rows]
        ids = iter(draw(st.permutations(range(1, sum(counts) + 1))))
        table = torch.full((len(rows), -(-max_model_len // block_size)), NONSENSE, dtype=torch.int32)
        for row, count in enumerate(counts):
            table[row, :count] = torch.tensor([next(ids) for _ in range(count)], dtype=torch.int32)
        tables.append(table)
        num_blocks.append(torch.tensor(counts, dtype=torch.int32))
    return rows, block_sizes, max_model_len, tables, num_blocks


def flat_of(rows):
    computed, new = (torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True))
    return flatten_batch(new, computed, int(new.sum()))


def map_slots(tables, num_blocks, flat, block_sizes, how, num_padded=3):
    out = torch.full((len(tables), len(flat.positions) + num_padded), 12345)
    sizes = torch.tensor(block_sizes, dtype=torch.int32)
    slots = compute_slot_mapping(
        PointerTable.of(tables), num_blocks, flat.query_start_loc, flat.positions, sizes, out, how
    )
    return slots, out


# ------------------------------------------------------------------ flat indices


@given(batches())
def test_flat_indices_follow_their_definitions(batch):
    rows, *_ = batch
    flat = flat_of(rows)
    expected = [(row, computed + i, i) for row, (computed, new) in enumerate(rows) for i in range(new)]
    assert list(zip(flat.req_indices.tolist(), flat.positions.tolist(), flat.arange.tolist(), strict=True)) == expected
    starts = flat.query_start_loc.tolist()
    assert [b - a for a, b in itertools.pairwise(starts)] == [new for _, new in rows] and starts[0] == 0
    assert flat.seq_lens.tolist() == [computed + new for computed, new in rows]
    assert flat.positions[flat.logits_indices].tolist() == [n - 1 for n in flat.seq_lens.tolist()]


def test_dtypes_are_those_of_vllm():
    flat = flat_of([(3, 2)])
    assert {name: array.dtype for name, array in flat._asdict().items()} == {
        "req_indices": torch.int64, "arange": torch.int64, "positions": torch.int64,
        "query_start_loc": torch.int32, "seq_lens": torch.int32, "logits_indices": torch.int64,
    }  # fmt: skip


@given(batches())
def test_token_index_finds_row_and_position_again(batch):
    rows, _, max_model_len, *_ = batch
    flat = flat_of(rows)
    where = token_indices(flat.req_indices, flat.positions, max_model_len)
    assert torch.equal(where // max_model_len, flat.req_indices)
    assert torch.equal(where % max_model_len, flat.positions)


# ------------------------------------------------------------------ slots


@given(batches())
def test_slot_leads_back_to_block_offset_row_and_position(batch):
    rows, (block_size,), _, (table,), _ = batch
    flat = flat_of(rows)
    chain = slot_chain(table, flat.req_indices, flat.positions, block_size)
    owner = {int(b): (row, i) for row, ids in enumerate(table) for i, b in enumerate(ids) if b != NONSENSE}
    back = []
    for slot in chain.slot.tolist():
        row, logical_block = owner[slot // block_size]
        back.append((row, logical_block * block_size + slot % block_size))
    assert back == list(zip(flat.req_indices.tolist(), flat.positions.tolist(), strict=True))
    assert len(set(chain.slot.tolist())) == len(back)  # no two tokens share a slot
    assert (chain.table_index // table.shape[1]).tolist() == flat.req_indices.tolist()
    assert (chain.table_index % table.shape[1]).tolist() == chain.logical_block.tolist()


@settings(deadline=None, max_examples=30)
@given(batches(max_groups=3))
def test_kernel_and_twin_map_every_group_alike_and_pad_with_minus_one(batch):
    pytest.importorskip("triton")
    rows, block_sizes, _, tables, num_blocks = batch
    flat = flat_of(rows)
    by_twin, out_of_twin = map_slots(tables, num_blocks, flat, block_sizes, "torch")
    by_kernel, out_of_kernel = map_slots(tables, num_blocks, flat, block_sizes, "interpreted")
    assert torch.equal(out_of_twin, out_of_kernel)
    assert torch.equal(out_of_kernel[:, len(flat.positions) :], torch.full((len(tables), 3), -1))
    for group, block_size in enumerate(block_sizes):
        chain = slot_chain(tables[group], flat.req_indices, flat.positions, block_size)
        assert torch.equal(chain.slot, by_twin[group]) and torch.equal(chain.slot, by_kernel[group])


def test_kernel_walks_more_tokens_than_one_tile(how):
    rows = [(0, 700), (5, 1), (300, 513)]
    table = torch.arange(1, 3 * 60 + 1, dtype=torch.int32).reshape(3, 60).flip(1).contiguous()
    flat = flat_of(rows)
    (slots,), _ = map_slots([table], [torch.full((3,), 60, dtype=torch.int32)], flat, [16], how, num_padded=600)
    assert torch.equal(slots, slot_chain(table, flat.req_indices, flat.positions, 16).slot)


def test_slots_beyond_32_bits_are_not_cut(how):
    table = torch.tensor([[2**31 - 2]], dtype=torch.int32)
    (slots,), _ = map_slots([table], [torch.ones(1, dtype=torch.int32)], flat_of([(0, 2)]), [16], how)
    assert slots.tolist() == [(2**31 - 2) * 16, (2**31 - 2) * 16 + 1]


def test_position_without_a_block_is_refused_instead_of_read_from_the_stale_tail():
    table = torch.tensor([[5, 9]], dtype=torch.int32)  # 9 is an earlier request's
    flat = flat_of([(4, 1)])
    with pytest.raises(IndexError, match=r"rows \[0\] have no block for positions \[4\]"):
        compute_slot_mapping_reference(
            table, torch.ones(1, dtype=torch.int32), flat.query_start_loc, flat.positions, 4
        )


def test_bug_row_20_second_chunk_is_mapped_from_its_computed_tokens_on(how):
    table = torch.tensor([[6, 7, 8]], dtype=torch.int32)
    (slots,), _ = map_slots([table], [torch.tensor([3], dtype=torch.int32)], flat_of([(4, 4)]), [4], how)
    assert slots.tolist() == [28, 29, 30, 31]


def test_bug_row_20_three_rows_in_a_table_five_wide(how):
    table = torch.zeros((3, 5), dtype=torch.int32)
    for row, ids in enumerate(([3], [7, 1, 4], [2, 9])):
        table[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    flat = flat_of([(0, 2), (0, 5), (0, 3)])
    chain = slot_chain(table, flat.req_indices, flat.positions, 2)
    assert chain.table_index.tolist() == [0, 0, 5, 5, 6, 6, 7, 10, 10, 11]
    (slots,), _ = map_slots([table], [torch.tensor([1, 3, 2], dtype=torch.int32)], flat, [2], how)
    assert slots.tolist() == [6, 7, 14, 15, 2, 3, 8, 4, 5, 18]


# ------------------------------------------------------------------ gather of block tables


@settings(deadline=None, max_examples=30)
@given(batches(max_groups=3), st.randoms(use_true_random=False))
def test_gather_copies_valid_ids_in_batch_order_and_leaves_the_rest_as_it_was(batch, rng):
    pytest.importorskip("triton")
    rows, _, _, tables, num_blocks = batch
    order = rng.sample(range(len(rows)), rng.randint(1, len(rows)))
    idx_mapping = torch.tensor(order, dtype=torch.int32)
    counts = torch.stack(num_blocks)
    results = []
    for how in HOWS:
        target = [torch.full_like(table, -7) for table in tables]
        gather_block_tables(PointerTable.of(tables), PointerTable.of(target), counts, idx_mapping, how)
        results.append(target)
    for group, (by_twin, by_kernel) in enumerate(zip(*results, strict=True)):
        assert torch.equal(by_twin, by_kernel)
        expected = torch.full_like(tables[group], -7)
        for batch_idx, req_state_idx in enumerate(order):
            count = int(counts[group, req_state_idx])
            expected[batch_idx, :count] = tables[group][req_state_idx, :count]
        assert torch.equal(by_twin, expected)


def test_gather_of_rows_longer_than_one_tile(how):
    source = torch.arange(2 * 1000, dtype=torch.int32).reshape(2, 1000)
    target, mapping = torch.zeros_like(source), torch.tensor([1, 0], dtype=torch.int32)
    counts = torch.tensor([[1000, 513]], dtype=torch.int32)
    gather_block_tables(PointerTable.of([source]), PointerTable.of([target]), counts, mapping, how)
    assert torch.equal(target[0, :513], source[1, :513]) and not target[0, 513:].any()
    assert torch.equal(target[1], source[0])


def test_gather_of_the_row_6_and_row_7_example():
    source, target = torch.zeros((8, 3), dtype=torch.int32), torch.full((8, 3), 99, dtype=torch.int32)
    source[6, :2], source[7, :2] = torch.tensor([81, 44]), torch.tensor([37, 12])
    counts = torch.tensor([0, 0, 0, 0, 0, 0, 2, 2], dtype=torch.int32)
    gather_block_tables_reference(source, target, counts, torch.tensor([7, 6], dtype=torch.int32))
    assert target[:2].tolist() == [[37, 12, 99], [81, 44, 99]]


# ------------------------------------------------------------------ what a row is made of


def test_staged_writes_go_where_they_belong_and_say_how_many_bytes_moved():
    staged = StagedTensor(3, 4, torch.device("cpu"))
    assert staged.apply() == 0
    staged.stage(2, 1, [7, 8])
    staged.stage(0, 0, [5])
    assert staged.apply() == 3 * (8 + 4)  # places in 64 bits, values in 32
    assert staged.tensor.tolist() == [[5, 0, 0, 0], [0, 0, 0, 0], [0, 7, 8, 0]]
    assert staged.apply() == 0


def test_tokens_from_any_position_are_prompt_then_output():
    request = CachedRequestState("r0", [1, 2, 3], SamplingParams(), ([],), 0, None, [4, 5])
    assert [request.token_ids_from(start) for start in range(6)] == [[1, 2, 3, 4, 5][start:] for start in range(6)]
