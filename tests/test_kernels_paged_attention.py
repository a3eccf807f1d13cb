"""Paged attention: the kernel under Triton's interpreter and the fast torch backend, beside the definition."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedlab.attention.metadata import CommonAttentionMetadata
from pagedlab.attention.torch_backend import TorchMetadataBuilder, heads_first, paged_attention_calls
from pagedlab.kernels.paged_attention import (
    QueryTiles,
    choose_num_splits,
    paged_attention,
    paged_attention_reference,
)
from pagedlab.kv.specs import AttentionSpec

RUBBISH = 2**30


class Case:
    """Rows of (query_len, seq_len) over blocks in random order; what no row wrote holds ``fill``."""

    def __init__(self, rows, *, block_size, num_heads, num_kv_heads, head_size, window=None, dtype=torch.float32,
                 seed=0, fill=float("nan")):
        random = torch.Generator().manual_seed(seed)
        self.rows, self.window, self.block_size = rows, window, block_size
        widths = [-(-seq_len // block_size) for _, seq_len in rows]
        num_blocks = sum(widths) + 1
        self.query = torch.randn(sum(q for q, _ in rows), num_heads, head_size, generator=random).to(dtype)
        self.kv_cache = torch.full((2, num_blocks, block_size, num_kv_heads, head_size), fill, dtype=dtype)
        free = (torch.randperm(num_blocks - 1, generator=random) + 1).tolist()
        self.block_table = torch.full((len(rows), max(widths) + 1), RUBBISH, dtype=torch.int32)
        self.expected_reads = []
        for row, (query_len, seq_len) in enumerate(rows):
            first = 0 if window is None else max(0, seq_len - query_len - window + 1)
            table = [free.pop() for _ in range(widths[row])]
            for position in range(first, seq_len):
                self.kv_cache[:, table[position // block_size], position % block_size] = torch.randn(
                    2, num_kv_heads, head_size, generator=random
                ).to(dtype)
            table[: first // block_size] = [0] * (first // block_size)
            self.block_table[row, : widths[row]] = torch.tensor(table, dtype=torch.int32)
            self.expected_reads.append(table[first // block_size :])
        self.query_lens = [q for q, _ in rows]
        self.query_start_loc = torch.tensor([0, *self.query_lens]).cumsum(0).int()
        self.seq_lens = torch.tensor([s for _, s in rows]).int()
        self.scale = head_size**-0.5

    def reference(self, dtype=torch.float64):
        reads = torch.full_like(self.block_table, -1)
        output = paged_attention_reference(
            self.query.to(dtype), self.kv_cache.to(dtype), self.query_start_loc, self.seq_lens, self.block_table,
            scale=self.scale, sliding_window=self.window, reads=reads,
        )
        assert self.blocks(reads) == self.expected_reads
        return output

    def interpreted(self, num_splits=1):
        pytest.importorskip("triton")
        group = self.query.shape[1] // self.kv_cache.shape[3]
        output = torch.full_like(self.query, 7)
        reads = torch.full_like(self.block_table, -1)
        paged_attention(
            self.query, self.kv_cache, output, QueryTiles.cut(self.query_lens, group, 64, self.query.device),
            self.query_start_loc, self.seq_lens, self.block_table, scale=self.scale, sliding_window=self.window,
            num_splits=num_splits, how="interpreted", reads=reads,
        )
        assert self.blocks(reads) == self.expected_reads
        return output

    def torch_backend(self, num_calls=None):
        spec = AttentionSpec(self.block_size, self.kv_cache.shape[3], self.kv_cache.shape[4],
                             str(self.query.dtype).removeprefix("torch."), self.window)
        common = CommonAttentionMetadata(
            group_id=0, req_ids=[f"r{i}" for i in range(len(self.rows))], query_lens=self.query_lens,
            num_actual_tokens=len(self.query), query_start_loc=self.query_start_loc, seq_lens=self.seq_lens,
            max_query_len=max(self.query_lens), max_seq_len=int(self.seq_lens.max()), block_table=self.block_table,
            slot_mapping=torch.zeros(len(self.query), dtype=torch.int64),
        )
        reads = torch.full_like(self.block_table, -1)
        metadata = TorchMetadataBuilder(0, spec, self.query.shape[1] // spec.num_kv_heads).build(common)
        assert num_calls is None or len(metadata.calls) == num_calls
        kv_cache = heads_first(heads_first(self.kv_cache).contiguous())
        output = paged_attention_calls(self.query, kv_cache, metadata, self.scale, reads)
        assert self.blocks(reads) == self.expected_reads
        return output

    @staticmethod
    def blocks(reads):
        return [[block_id for block_id in row if block_id >= 0] for row in reads.tolist()]


cases = st.builds(
    Case,
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)).map(lambda t: (t[0], sum(t))), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 2, 8, 16, 32, 128]),
    num_heads=st.sampled_from([6, 12]),
    num_kv_heads=st.sampled_from([1, 2, 3, 6]),
    head_size=st.sampled_from([32, 64, 80, 96, 128, 256]),
    window=st.sampled_from([None, 1, 5, 16, 30]),
    seed=st.integers(0, 99),
)


@settings(deadline=None, max_examples=30)
@given(case=cases, num_splits=st.sampled_from([1, 1, 3]))
def test_interpreted_kernel_computes_the_definition(case, num_splits):
    torch.testing.assert_close(case.interpreted(num_splits).double(), case.reference(), atol=1e-5, rtol=1e-5)


@settings(deadline=None, max_examples=100)
@given(case=cases)
def test_torch_backend_computes_the_definition(case):
    torch.testing.assert_close(case.torch_backend().double(), case.reference(), atol=1e-5, rtol=1e-5)


decodes = st.lists(st.integers(1, 60).map(lambda seq_len: (1, seq_len)), min_size=1, max_size=6)


@pytest.mark.parametrize("elsewhere", [
    patch.object(TorchMetadataBuilder, "_plan_in_place", TorchMetadataBuilder._plan_copy),
    patch("pagedlab.attention.torch_backend.samples_products", lambda: False),
], ids=["gpu", "torch-without-sampled-products"])  # fmt: skip
@settings(deadline=None, max_examples=50)
@given(rows=decodes, window=st.sampled_from([None, 1, 5, 30]), seed=st.integers(0, 99))
def test_decodes_as_they_are_planned_elsewhere(elsewhere, rows, window, seed):
    case = Case(rows, block_size=4, num_heads=6, num_kv_heads=2, head_size=32, window=window, seed=seed)
    with elsewhere:
        torch.testing.assert_close(case.torch_backend().double(), case.reference(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float64(dtype):
    case = Case([(3, 20), (1, 33)], block_size=16, num_heads=4, num_kv_heads=2, head_size=64, dtype=dtype)
    for found in (case.interpreted(), case.torch_backend(), case.interpreted(num_splits=2)):
        torch.testing.assert_close(found.double(), case.reference(), atol=2e-2, rtol=2e-2)


def test_a_long_prefill_is_cut_into_tiles_of_64_rows():
    case = Case([(70, 90), (1, 12)], block_size=16, num_heads=4, num_kv_heads=2, head_size=32, window=25)
    torch.testing.assert_close(case.interpreted().double(), case.reference(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(case.torch_backend().double(), case.reference(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_much_shorter_than_its_neighbours_has_a_call_of_its_own(dtype):
    """Blocks of 64 KiB, as in the builder's docstring; the prefill has a call of its own anyway."""
    rows = [(1, 3 * 16), (1, 24 * 16), (5, 40), (1, 2 * 16 + 1), (1, 22 * 16 + 1)]
    size = {"num_heads": 16, "num_kv_heads": 8 if dtype is torch.float32 else 16, "head_size": 64, "dtype": dtype}
    case, near = (Case(r, block_size=16, **size) for r in (rows, [(q, s + 200 * (s < 50 and q == 1)) for q, s in rows]))
    for found, expected in ((case.torch_backend(3), case.reference()), (near.torch_backend(2), near.reference())):
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("path", ["interpreted", "torch_backend", "split"])
def test_memory_nobody_wrote_never_shows(path, window, dtype):
    """NaN, infinity or rubbish in null block, tails and strangers' blocks: the same bits."""
    outputs = []
    for fill in (float("nan"), float("inf"), 1e4, 0.0):
        case = Case([(1, 5), (1, 9), (4, 6)], block_size=4, num_heads=4, num_kv_heads=2, head_size=32, fill=fill,
                    window=window, dtype=dtype)
        outputs.append(case.interpreted(num_splits=3) if path == "split" else getattr(case, path)())
    assert outputs[0].isfinite().all()
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0])


def test_a_reader_of_the_tail_would_show():
    """The counterpart: one position too many, and NaN comes through."""
    case = Case([(1, 5)], block_size=4, num_heads=4, num_kv_heads=2, head_size=32)
    case.seq_lens += 1
    case.expected_reads = [case.block_table[0, :2].tolist()]
    assert case.reference().isnan().all() and case.interpreted().isnan().any()


@pytest.mark.parametrize("path", ["interpreted", "torch_backend"])
def test_neighbours_and_idle_rows_change_nothing(path):
    rows = [(3, 3), (9, 9), (1, 4)]
    def make(r):
        return Case(r, block_size=4, num_heads=4, num_kv_heads=2, head_size=32)

    together = getattr(make(rows), path)()
    alone = getattr(make(rows[:1]), path)()
    assert together.isfinite().all()
    assert together.shape == (13, 4, 32) and alone.shape == (3, 4, 32)
    case = make(rows)
    expected = case.reference()
    case.block_table = torch.cat([case.block_table, torch.full_like(case.block_table[:1], RUBBISH)])
    case.query_start_loc = torch.cat([case.query_start_loc, case.query_start_loc[-1:]])
    case.seq_lens = torch.cat([case.seq_lens, torch.zeros(1, dtype=torch.int32)])
    case.query_lens, case.rows = [*case.query_lens, 0], [*rows, (0, 0)]
    case.expected_reads.append([])
    torch.testing.assert_close(getattr(case, path)().double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_padding_rows_of_a_graph_give_zeros(num_splits):
    """They have a query and no tokens, and a table of anything."""
    case = Case([(1, 20), (1, 0)], block_size=4, num_heads=4, num_kv_heads=2, head_size=32)
    output = case.interpreted(num_splits)
    assert output[0].abs().min() > 0 and not output[1].any()


def test_tiles_never_span_rows():
    tiles = QueryTiles.cut([1, 9], heads_per_kv_head=4, longest_block_m=16, device=torch.device("cpu"))
    assert tiles.block_m == 16
    assert tiles.batch_idx.tolist() == [0, 1, 1, 1]
    assert tiles.first_query.tolist() == [0, 0, 4, 8]


def test_only_few_long_decodes_are_split():
    assert choose_num_splits(1, 8, 1, 8192, num_processors=132) == 16
    assert choose_num_splits(1, 8, 1, 255, num_processors=132) == 1
    assert choose_num_splits(256, 8, 1, 8192, num_processors=132) == 1
    assert choose_num_splits(1, 8, 2, 8192, num_processors=132) == 1
    assert choose_num_splits(1, 8, 1, 7 * 256, num_processors=132) == 4


@pytest.mark.parametrize("path", ["interpreted", "torch_backend", "split"])
def test_blocks_beyond_32_bits_are_found(path):
    case = Case([(2, 7)], block_size=4, num_heads=2, num_kv_heads=1, head_size=32)
    expected = case.reference()
    memory = torch.empty(18 * 2**27 + 512, dtype=torch.float16)
    cache = memory.as_strided((2, 18, 4, 1, 32), (128, 2**27, 32, 32, 1))
    cache[:, [17, 1]] = case.kv_cache[:, case.block_table[0, :2].long()].half()
    case.kv_cache, case.query = cache, case.query.half()
    case.block_table[0, :2] = torch.tensor([17, 1])
    case.expected_reads = [[17, 1]]
    found = case.interpreted(num_splits=3) if path == "split" else getattr(case, path)()
    torch.testing.assert_close(found.double(), expected, atol=5e-3, rtol=5e-3)
