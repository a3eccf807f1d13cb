"""The events about rows and about the flat batch, built from its tensors; called only inside a guard."""

from __future__ import annotations

from collections.abc import Iterator

from pagedlab.kernels.jit import How
from pagedlab.kernels.slot_mapping import slot_chain
from pagedlab.trace.events import BatchOrdered, Event, InputsPrepared, RowAssigned, SlotsMapped, TablesGathered
from pagedlab.worker.input_batch import InputBatch
from pagedlab.worker.requests import CachedRequestState


def row_assigned(request: CachedRequestState, row: int) -> RowAssigned:
    return RowAssigned(
        request_id=request.req_id, row=row, block_ids=[list(ids) for ids in request.block_ids],
        num_computed_tokens=request.num_computed_tokens,
    )  # fmt: skip


def batch_events(
    batch: InputBatch, num_blocks: list[list[int]], block_sizes: list[int], how: How, *, with_idx_mapping: bool
) -> Iterator[Event]:
    """batch_ordered, tables_gathered, inputs_prepared, slots_mapped.

    ``num_blocks`` is [G][R]: it cuts off what is stale in a row. Of the slot chain only ``slot`` is
    the kernel's own; the rest is derived here from the same table.
    """
    yield BatchOrdered(
        request_ids=list(batch.req_ids),
        idx_mapping=batch.idx_mapping.tolist() if with_idx_mapping else None,
        num_scheduled_tokens=list(batch.num_scheduled_tokens),
        query_start_loc=batch.query_start_loc.tolist(),
    )
    for group, table in enumerate(batch.block_tables):
        yield TablesGathered(
            group=group,
            request_ids=list(batch.req_ids),
            block_table=[row[:count] for row, count in zip(table.tolist(), num_blocks[group], strict=True)],
            table_stride=table.shape[1],
        )
    req_indices, positions = batch.req_indices.tolist(), batch.positions.tolist()
    yield InputsPrepared(
        input_ids=batch.input_ids.tolist(),
        positions=positions,
        req_indices=req_indices,
        seq_lens=batch.seq_lens.tolist(),
        logits_indices=batch.logits_indices.tolist(),
        sample_is_discarded=list(batch.sample_is_discarded),
    )
    for group, block_size in enumerate(block_sizes):
        table = batch.block_tables[group]
        chain = slot_chain(table, batch.req_indices, batch.positions, block_size)
        yield SlotsMapped(
            group=group,
            block_size=block_size,
            table_stride=table.shape[1],
            token=list(range(batch.num_tokens)),
            request_id=[batch.req_ids[batch_idx] for batch_idx in req_indices],
            row=req_indices,
            position=positions,
            logical_block=chain.logical_block.tolist(),
            offset=chain.offset.tolist(),
            table_index=chain.table_index.tolist(),
            block_id=chain.block_id.tolist(),
            slot=batch.slot_mappings[group].tolist(),
            how=how,
        )
