"""Figures of the worker: the flat batch, attention's writes and reads, and the index spaces."""

from __future__ import annotations

from pagedlab.figures.pick import only
from pagedlab.figures.record import stored
from pagedlab.figures.svg import Drawing
from pagedlab.figures.symbols import code
from pagedlab.trace.events import (
    BatchOrdered,
    InputsPrepared,
    KvRead,
    KvWritten,
    MetadataBuilt,
    SlotsMapped,
    TablesGathered,
)


def worker_inputs() -> Drawing:
    """_update_states and _prepare_inputs on the [2, 5, 3] example."""
    trace = stored("two-five-three")
    step = 0
    inputs, slots = only(trace, InputsPrepared, step)[0], only(trace, SlotsMapped, step)[0]
    tables, ordered = only(trace, TablesGathered, step)[0], only(trace, BatchOrdered, step)[0]
    d = Drawing(
        f"_update_states(), _prepare_inputs(): {ordered.num_scheduled_tokens} tokens, one batch of {len(slots.token)}",
        f"Rows of the block table are K = {tables.table_stride} wide. {slots.table_index} are places in the flattened "
        "table, not block ids; the ids stand there.",
    )
    d.text(40, 160, f"block table after _update_states(), rows of K = {tables.table_stride}", size=16, weight=650)
    for row, (request_id, table) in enumerate(zip(tables.request_ids, tables.block_table, strict=True)):
        d.text(40, 200 + row * 46, request_id, size=16, weight=700, fill=request_id)
        for k in range(tables.table_stride):
            known = k < len(table)
            d.cell(
                90 + k * 48,
                178 + row * 46,
                44,
                34,
                table[k] if known else "",
                stroke=request_id if known else "line",
                fill="paper" if known else "wash",
            )
        d.text(
            90 + tables.table_stride * 48 + 8,
            200 + row * 46,
            f"from index {row * tables.table_stride}",
            size=13,
            fill="dim",
            mono=True,
        )
    requests = inputs.req_indices
    rows: list[tuple[str, list[int] | list[str]]] = [
        ("token id", inputs.input_ids),
        ("req_indices: row", requests),
        ("positions", slots.position),
        (f"// {slots.block_size}: logical block", slots.logical_block),
        ("row · K + logical: table index", slots.table_index),
        ("table there: block", slots.block_id),
        (f"% {slots.block_size}: offset", slots.offset),
        (f"block · {slots.block_size} + offset: slot", slots.slot),
    ]
    top, width = 360, 84
    for i, (name, values) in enumerate(rows):
        last = i == len(rows) - 1
        d.text(40, top + 24 + i * 38, name, size=15, weight=700 if last else 400)
        for token, value in enumerate(values):
            request_id = slots.request_id[token]
            d.cell(
                320 + token * width, top + i * 38, width - 6, 32, value, stroke=request_id, thick=2.5 if last else 1.2
            )
    d.text(830, 200, f"query_start_loc {ordered.query_start_loc}", size=15, mono=True)
    d.text(830, 228, f"seq_lens        {inputs.seq_lens}", size=15, mono=True)
    d.text(830, 256, f"logits_indices  {inputs.logits_indices}", size=15, mono=True)
    d.text(
        830,
        290,
        code("worker.persistent_batch:PersistentBatchRunner._update_states"),
        size=12.5,
        fill="accent",
        mono=True,
    )
    d.text(
        830,
        310,
        code("worker.persistent_batch:PersistentBatchRunner._prepare_inputs"),
        size=12.5,
        fill="accent",
        mono=True,
    )
    d.text(830, 330, code("kernels.slot_mapping:compute_slot_mapping"), size=12.5, fill="accent", mono=True)
    return d


def attention_writes_and_reads() -> Drawing:
    """Where attention uses slot_mapping and where block_table."""
    trace = stored("two-five-three")
    step = 0
    written = only(trace, KvWritten, step)[0]
    reads = [r for r in only(trace, KvRead, step) if r.layer == written.layer]
    metadata, inputs = only(trace, MetadataBuilt, step)[0], only(trace, InputsPrepared, step)[0]
    slots = only(trace, SlotsMapped, step)[0]
    d = Drawing(
        "Attention writes by slot_mapping and reads by block_table",
        "Writing a key and value needs one slot per new token. Reading needs the whole row of blocks and the length of "
        "each request. In every layer all writes come before any read.",
    )
    d.card(40, 130, 360, 150, "1 · write", [
        f"keys and values of {len(written.slot)} new tokens",
        f"slot_mapping {written.slot}",
    ])  # fmt: skip
    d.text(54, 268, code("kernels.reshape_and_cache:reshape_and_cache"), size=13, fill="accent", mono=True)
    d.card(460, 130, 360, 150, "forward context", [
        "every layer's metadata, found by its name",
        "a variable of a module, in vLLM 0.14 too; not a thread-local",
    ])  # fmt: skip
    d.text(474, 268, code("attention.layer:Attention.forward"), size=13, fill="accent", mono=True)
    d.card(880, 130, 360, 150, "2 · read", [
        f"queries of {metadata.num_actual_tokens} tokens, at most {metadata.max_query_len} of one request",
        f"seq_lens {inputs.seq_lens}",
        "block_table: " + ", ".join(f"{r.request_id} {r.block_ids}" for r in reads),
    ])  # fmt: skip
    d.text(894, 268, code("kernels.paged_attention:paged_attention"), size=13, fill="accent", mono=True)
    d.arrow(456, 200, 404, 200)
    d.arrow(824, 200, 876, 200)
    bottom = _written_cache(d, written, slots)
    cell = _cell_width(written)
    d.text(40, bottom + 34, "what the reader reported, under the blocks it read", size=16, weight=650)
    for k, read in enumerate(reads):
        y = bottom + 52 + k * 46
        for block in read.block_ids:
            d.cell(40 + block * cell, y, cell - 8, 36, f"block {block}", stroke=read.request_id, ink=read.request_id)
        length = inputs.seq_lens[slots.row[slots.request_id.index(read.request_id)]]
        words = f"{read.request_id} reads {read.block_ids}, of which {length} tokens count"
        d.text(40 + (max(written.block_id) + 2) * cell + 16, y + 24, words, size=15, fill=read.request_id)
    d.arrow(220, 284, 220, 330, stroke="accent")
    d.arrow(1150, bottom + 50, 1150, 288, stroke="accent")
    return d


def _cell_width(written: KvWritten) -> float:
    return min(86.0, 1180 / (max(written.block_id) + 2))


def _written_cache(d: Drawing, written: KvWritten, slots: SlotsMapped) -> float:
    """The cache of one layer as the writer filled it; returns where it ends."""
    d.text(40, 352, f"the cache of {written.layer}: what the writer reported (t0 is the batch's first token)",
           size=16, weight=650)  # fmt: skip
    owner = dict(zip(slots.slot, slots.request_id, strict=True))
    token_of = dict(zip(written.slot, written.token, strict=True))
    size, cell = slots.block_size, _cell_width(written)
    for block in range(max(written.block_id) + 2):
        x = 40 + block * cell
        d.text(x + cell / 2 - 3, 382, "∅" if block == 0 else f"block {block}", size=13, fill="dim", anchor="middle")
        for offset in range(size):
            slot, y = block * size + offset, 392 + offset * 48
            if slot in token_of:
                d.cell(x, y, cell - 8, 42, f"t{token_of[slot]}", stroke=owner[slot], ink=owner[slot], thick=2.5)
            else:
                d.cell(x, y, cell - 8, 42, "", fill="wash")
            d.text(x + 5, y + 13, slot, size=10, fill="dim", mono=True)
    d.text(40 + (max(written.block_id) + 2) * cell + 16, 420, "small: the slot", size=14, fill="dim")
    return 392.0 + size * 48


def index_spaces() -> Drawing:
    """The index spaces of the request-state-table runner."""
    trace = stored("state-rows")
    step = 0
    ordered, slots = only(trace, BatchOrdered, step)[0], only(trace, SlotsMapped, step)[0]
    assert ordered.idx_mapping is not None
    d = Drawing(
        "Index spaces: token → batch row → state row → position → block → slot",
        f"The newer runner keeps a request in a fixed state row and sorts each step's batch by number of tokens: "
        f"{ordered.num_scheduled_tokens}. idx_mapping {ordered.idx_mapping} leads from batch row to state row.",
    )
    columns = [("token", 90), ("batch row", 330), ("state row", 560), ("position", 780), ("block", 980), ("slot", 1160)]
    for name, x in columns:
        d.text(x, 150, name, size=16, weight=650, anchor="middle")
    height = 500 / len(slots.token)
    ys = [170 + i * height for i in range(len(slots.token))]
    first = {row: slots.row.index(row) for row in dict.fromkeys(slots.row)}
    middle = {row: ys[first[row]] + (slots.row.count(row) - 1) * height / 2 for row in first}
    for i, y in enumerate(ys):
        request_id, row = slots.request_id[i], slots.row[i]
        d.line(118, y + 17, 295, middle[row] + 17, stroke=request_id)
        d.line(595, middle[row] + 17, 752, y + 17, stroke=request_id)
        d.line(808, y + 17, 945, y + 17, stroke=request_id)
        d.line(1015, y + 17, 1125, y + 17, stroke=request_id)
        d.cell(62, y, 56, 34, slots.token[i], stroke=request_id)
        d.cell(752, y, 56, 34, slots.position[i], stroke=request_id)
        d.cell(945, y, 70, 34, f"{slots.block_id[i]}+{slots.offset[i]}", stroke=request_id)
        d.cell(1125, y, 70, 34, slots.slot[i], stroke=request_id, thick=2.5)
    for row, y in middle.items():
        request_id = ordered.request_ids[row]
        d.line(365, y + 17, 525, y + 17, stroke=request_id, thick=3)
        d.cell(295, y, 70, 34, row, stroke=request_id, thick=2.5)
        d.cell(525, y, 70, 34, ordered.idx_mapping[row], stroke=request_id, thick=2.5)
        d.text(445, y + 10, request_id, size=15, weight=700, fill=request_id, anchor="middle")
    d.text(
        40,
        705,
        f"slot = block · {slots.block_size} + offset;  "
        f"table index = batch row · K {slots.table_stride} + position // {slots.block_size}",
        size=14,
        fill="dim",
        mono=True,
    )
    return d
