"""Decode steps as CUDA graphs: recorded launches, replayed at once (vllm/v1/worker/gpu/cudagraph_utils.py).

A decode of a small model launches hundreds of kernels that each take microseconds; replaying them as
one graph leaves the host out. A graph has fixed shapes and addresses, so a batch is padded to the
next captured size and copied into buffers that stay. vLLM captures all sizes when it starts, here each
is captured when it is first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pagedlab.attention.backends import MetadataBuilder
from pagedlab.attention.forward_context import set_forward_context
from pagedlab.attention.metadata import CommonAttentionMetadata
from pagedlab.errors import notice
from pagedlab.kernels.slot_mapping import PAD_SLOT_ID
from pagedlab.kv.specs import KVCacheGroupSpec
from pagedlab.models.qwen3 import Qwen3ForCausalLM
from pagedlab.trace.events import MetadataBuilt
from pagedlab.trace.tracer import trace
from pagedlab.worker.input_batch import InputBatch

LARGEST_SIZE = 512

Run = Callable[[], Tensor]  # one forward pass over the buffers: hidden states [size, hidden_size]


def captured_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4 and multiples of 8. 20 seats give [1, 2, 4, 8, 16, 24], so that 20 rows fit too."""
    most = min(-(-max_num_seqs // 8) * 8, LARGEST_SIZE)
    return [1, 2, 4, *range(8, most + 1, 8)]


class DecodeGraphs:
    """Captures a size when it is first needed, and checks it against the eager pass before it trusts it."""

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        groups: Sequence[KVCacheGroupSpec],
        builders: Sequence[MetadataBuilder],
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_num_blocks: Sequence[int],  # G × K
        device: torch.device,
        capture: Callable[[Run], Run] | None = None,  # tests replace it where there is no GPU
    ) -> None:
        self.model, self.groups, self.builders = model, groups, builders
        self.max_model_len = max_model_len
        self.sizes = captured_sizes(max_num_seqs)
        self._capture = capture or partial(capture_graph, pool=torch.cuda.graph_pool_handle())
        self._replays: dict[int, Run] = {}
        self._metadata: dict[int, dict[str, Any]] = {}  # of each size: a graph reads its tensors, and keeps none alive
        most = self.sizes[-1]
        self.input_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self.positions = torch.zeros(most, dtype=torch.int64, device=device)
        self.query_start_loc = torch.arange(most + 1, dtype=torch.int32, device=device)  # a query per row, always
        self.seq_lens = torch.zeros(most, dtype=torch.int32, device=device)
        self.block_tables = [torch.zeros((most, k), dtype=torch.int32, device=device) for k in max_num_blocks]
        self.slot_mappings = [torch.full((most,), PAD_SLOT_ID, dtype=torch.int64, device=device) for _ in groups]

    @property
    def captured(self) -> list[int]:
        """Sizes that were captured and agreed with the eager pass; none once one did not."""
        return [size for size in self.sizes if size in self._replays]

    def run(self, batch: InputBatch) -> Tensor | None:
        """Hidden states of a decode batch, rows beyond R padding; None for a batch that must run eagerly."""
        if batch.max_query_len > 1 or batch.num_reqs > self.sizes[-1]:
            return None
        size = next(size for size in self.sizes if size >= batch.num_reqs)
        self._fill(batch, size)
        if size not in self._replays and not self._add(size):
            return None
        if trace.tensors:
            for group_id in range(len(self.groups)):
                trace.emit(self._metadata_event(batch, group_id, size))
        return self._replays[size]()

    def _fill(self, batch: InputBatch, size: int) -> None:
        """Copy the batch into the buffers; padding has seq_len 0, slot -1 and reads nothing.

        Three rows in a graph of four: seq_lens [17, 5, 9, 0], slots [33, 20, 88, -1].
        """
        num_reqs = batch.num_reqs
        self.input_ids[:num_reqs] = batch.input_ids
        self.positions[:num_reqs] = batch.positions
        self.seq_lens[:num_reqs] = batch.seq_lens
        self.input_ids[num_reqs:size].zero_()  # launches nothing where there is no padding, unlike ``= 0``
        self.positions[num_reqs:size].zero_()
        self.seq_lens[num_reqs:size].zero_()
        for group_id in range(len(self.groups)):
            self.block_tables[group_id][:num_reqs] = batch.block_tables[group_id]
            self.slot_mappings[group_id][:num_reqs] = batch.slot_mappings[group_id]
            self.slot_mappings[group_id][num_reqs:size].fill_(PAD_SLOT_ID)

    def _add(self, size: int) -> bool:
        """Capture this size; on failure give graphs up for good and say so once."""
        metadata = self._metadata[size] = {}
        for group_id, (group, builder) in enumerate(zip(self.groups, self.builders, strict=True)):
            metadata.update(dict.fromkeys(group.layer_names, builder.build(self._common(group_id, size))))

        def run() -> Tensor:
            with set_forward_context(metadata):
                return self.model(self.input_ids[:size], self.positions[:size])

        is_real = self.seq_lens[:size] > 0
        expected = run()[is_real].clone()  # also compiles the kernels, which a capture must not
        try:
            replay = self._capture(run)
            agrees = torch.allclose(replay()[is_real], expected, atol=1e-3, rtol=1e-2)
            reason = "a replay differs from the eager pass"
        except RuntimeError as error:
            agrees, reason = False, str(error).split("\n")[0]
        if agrees:
            self._replays[size] = replay
        else:
            self.sizes = [0]  # no batch fits any more
            notice(f"running without CUDA graphs ({reason}).")
        return agrees

    def _common(self, group_id: int, size: int) -> CommonAttentionMetadata:
        """What a step of ``size`` decodes looks like, as long as any may be: shapes are fixed from here on."""
        return CommonAttentionMetadata(
            group_id=group_id,
            req_ids=[],
            query_lens=[1] * size,
            num_actual_tokens=size,
            query_start_loc=self.query_start_loc[: size + 1],
            seq_lens=self.seq_lens[:size],
            max_query_len=1,
            max_seq_len=self.max_model_len,
            block_table=self.block_tables[group_id][:size],
            slot_mapping=self.slot_mappings[group_id][:size],
        )

    def _metadata_event(self, batch: InputBatch, group_id: int, size: int) -> MetadataBuilt:
        """Nothing is built at a replay; the event says what the graph was given."""
        return MetadataBuilt(
            group=group_id,
            backend=f"triton, CUDA graph of {size} rows replayed",
            shapes={"block_table": list(self.block_tables[group_id][:size].shape), "slot_mapping": [size]},
            num_actual_tokens=batch.num_tokens,
            max_query_len=1,
            max_seq_len=batch.max_seq_len,
        )


def capture_graph(run: Run, pool: Any = None) -> Run:
    """Record the launches of one pass; calling the result launches them all again.

    Graphs of one pool share the memory of their intermediate results: two never run at the same time.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        output = run()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay
