"""The index chain of a step's tokens, the flat batch, and what the kernels report."""

from __future__ import annotations

from rich.text import Text

from pagedlab.trace.events import (
    BatchOrdered,
    InputsPrepared,
    KernelLaunched,
    KvRead,
    KvWritten,
    MetadataBuilt,
    RowsStaged,
    SlotsMapped,
    TablesGathered,
)
from pagedlab.viz.layout import Part, Pen
from pagedlab.viz.step_view import StepView
from pagedlab.wording import plural

HOW = {
    "compiled": "compiled kernel", "interpreted": "interpreted kernel", "torch": "plain torch",
    "graph_replay": "graph replay", "triton": "compiled Triton kernel",
    "triton-interpreted": "interpreted Triton kernel",
}


def index_chain(pen: Pen, view: StepView, *, formula: bool) -> list[Text]:
    """token → row → position → logical block + offset → table index → physical block → slot."""
    lines: list[Text] = []
    maps = view.of(SlotsMapped)
    inputs = view.first(InputsPrepared)
    for event in maps:
        if len(maps) > 1:
            lines.append(pen.line((f"group {event.group}, block size {event.block_size}", "dim")))
        shown = _chosen(event, pen.limits.chain)
        rows: list[list[Part]] = []
        for i in shown:
            if i is None:
                continue
            rows.append([
                (str(event.token[i]), "dim"), (_token_text(pen, view, event, i, inputs), "written"),
                str(event.row[i]), str(event.position[i]), f"{event.logical_block[i]} + {event.offset[i]}",
                _table_index(event, i, spelled=pen.width >= 88),
                (str(event.block_id[i]), "number"), (str(event.slot[i]), "chosen"),
            ])
        wide = pen.width >= 78
        header: list[Part] = (
            ["token", "text", "row", "position", "logical + offset", "table index", "block", "slot"] if wide
            else ["tok", "text", "row", "pos", "log+off", "index", "block", "slot"]
        )
        right = [True, False, True, True, True, True, True, True]
        table = pen.table(header, rows, right=right, gap=" → " if pen.width >= 70 else " ")
        hidden = len(event.token) - len(rows)
        if hidden and None in shown:
            table.insert(1 + shown.index(None), pen.line((f"… {hidden} more", "dim")))
        lines += table
        if formula:
            for sentence in (
                f"position ÷ {event.block_size} = logical block, the remainder is the offset",
                f"row · {event.table_stride} + logical block = table index: a place in the flattened block table, "
                "not a block id; the block's id stands there",
                f"block · {event.block_size} + offset = slot",
            ):
                lines += pen.paragraph((sentence, "dim"), hang=2)
    return lines


def _table_index(event: SlotsMapped, i: int, *, spelled: bool) -> str:
    """``1 · 8 + 2 = 10`` where there is room, and where the event's numbers agree."""
    terms = (event.row[i], event.table_stride, event.logical_block[i])
    if spelled and terms[0] * terms[1] + terms[2] == event.table_index[i]:
        return f"{terms[0]} · {terms[1]} + {terms[2]} = {event.table_index[i]}"
    return str(event.table_index[i])


def _chosen(event: SlotsMapped, limit: int) -> list[int | None]:
    """Indices shown: all, or the first ones and each request's last; None where some are left out."""
    count = len(event.token)
    if count <= limit:
        return list(range(count))
    ends = [i for i in range(count) if i + 1 == count or event.request_id[i + 1] != event.request_id[i]]
    ends = ends[-max(1, limit // 2):]
    head = [i for i in range(count) if i not in ends][: limit - len(ends)]
    both = sorted({*head, *ends})
    cut = next((k for k in range(1, len(both)) if both[k] != both[k - 1] + 1), len(both))
    return [*both[:cut], None, *both[cut:]]


def _token_text(pen: Pen, view: StepView, event: SlotsMapped, i: int, inputs: InputsPrepared | None) -> str:
    row = view.requests.get(event.request_id[i])
    if row is not None and event.position[i] < len(row.request.token_ids):
        token_id, text = row.token(event.position[i])
        return pen.token(text, token_id, width=12 if pen.width >= 70 else 8)
    if inputs is not None and event.token[i] < len(inputs.input_ids):
        return f"#{inputs.input_ids[event.token[i]]}"
    return "?"


def by_whom(pen: Pen, view: StepView) -> list[Text]:
    """Who computed the slots and who wrote, as recorded."""
    parts: list[Part] = []
    maps = view.of(SlotsMapped)
    if maps:
        parts += ["slots computed by ", (_how(maps[0].how), "number")]
    written = view.of(KvWritten)
    if written:
        sources = sorted({_how(event.source) for event in written})
        layers = len({event.layer for event in written})
        parts += [" · " if parts else "", "keys and values written by ", (", ".join(sources), "number"),
                  f" in {plural(layers, 'layer')}"]
    return pen.paragraph(*parts, hang=2) if parts else []


def _how(how: str) -> str:
    return HOW.get(how, "another writer")


def written(pen: Pen, view: StepView) -> list[Text]:
    """What the writer itself reports, beside the slots that were mapped."""
    events = view.of(KvWritten)
    lines: list[Text] = []
    mapped = {event.group: event.slot for event in view.of(SlotsMapped)}
    seen: dict[tuple[int, tuple[int, ...]], KvWritten] = {}
    same: dict[int, int] = {}
    for event in events:
        key = (event.group, tuple(event.slot))
        if key in seen:
            same[id(seen[key])] = same.get(id(seen[key]), 0) + 1
        else:
            seen[key] = event
    for event in seen.values():
        others = same.get(id(event), 0)
        count = plural(len(event.slot), "slot")
        head: list[Part] = [pen.plain(event.layer, 40), f" · {_how(event.source)} reports {count}"]
        if event.group in mapped:
            agrees = sorted(mapped[event.group]) == sorted(event.slot)
            head.append((" = the mapped ones", "good") if agrees else (", NOT the mapped ones", "bad"))
        if others:
            head.append((f"; the same slots in {plural(others, 'more layer')}", "dim"))
        lines += pen.paragraph(*head, hang=2)
        rows: list[list[Part]] = [
            [(str(event.token[i]), "dim"), (str(event.block_id[i]), "number"), str(event.offset[i]),
             (str(event.slot[i]), "chosen"), f"{event.checksum[i]:08x}"]
            for i in range(min(len(event.slot), pen.limits.chain))
        ]
        lines += pen.table(["token", "block", "offset", "slot", "checksum of key and value"], rows,
                           right=[True, True, True, True, False])
        if len(event.slot) > len(rows):
            lines.append(pen.line((f"… {len(event.slot) - len(rows)} more", "dim")))
    return lines


def launches(pen: Pen, view: StepView) -> list[Text]:
    """Kernels, those with the same launch in several layers together."""
    grouped: dict[tuple[str, str, str, str], list[str]] = {}
    for event in view.of(KernelLaunched):
        meta = ", ".join(f"{key} {value}" for key, value in event.meta.items())
        grouped.setdefault((event.name, str(event.grid), event.how, meta), []).append(event.layer)
    lines: list[Text] = []
    for (name, grid, how, meta), layers in grouped.items():
        where = plural(len(layers), "layer") if len(layers) > 1 else pen.plain(layers[0], 40)
        facts = [f"× {where}" if where else "", f"grid {grid}" if grid != "[]" else "", _how(how)]
        lines += pen.paragraph((pen.plain(name, 40), "number"), " " + " · ".join(fact for fact in facts if fact),
                               (f" · {pen.plain(meta)}" if meta else "", "dim"), hang=2)
    reads: dict[tuple[str, tuple[int, ...]], int] = {}
    for read in view.of(KvRead):
        key = (read.request_id, tuple(read.block_ids))
        reads[key] = reads.get(key, 0) + 1
    for (name, ids), count in list(reads.items())[: pen.limits.requests]:
        what = f": {'block' if len(ids) == 1 else 'blocks'} {pen.ids(ids)} in {plural(count, 'layer')}"
        lines += pen.paragraph("attention read for ", pen.name(name), what, hang=2)
    return lines


def batch(pen: Pen, view: StepView) -> list[Text]:
    """The flat batch that the worker hands to the model."""
    lines: list[Text] = []
    for staged in view.of(RowsStaged):
        what = ", ".join(pen.plain(name) for name in staged.what)
        lines += pen.paragraph(f"copied to the device: {staged.num_bytes:,} bytes ({what}) for rows "
                               f"{_numbers(pen, staged.rows)}", hang=2)
    ordered = view.first(BatchOrdered)
    if ordered is not None:
        rows: list[list[Part]] = []
        inputs = view.first(InputsPrepared)
        for i, name in enumerate(ordered.request_ids[: pen.limits.requests]):
            start, end = ordered.query_start_loc[i], ordered.query_start_loc[i + 1]
            state = str(ordered.idx_mapping[i]) if ordered.idx_mapping is not None else "same"
            seq_len = str(inputs.seq_lens[i]) if inputs is not None else "?"
            logits = str(inputs.logits_indices[i]) if inputs is not None else "?"
            kept = "" if inputs is None else "discarded" if inputs.sample_is_discarded[i] else "kept"
            rows.append([str(i), state, pen.name(name), f"{start}–{end - 1}", seq_len, logits, kept])
        lines += pen.table(["batch", "state row", "request", "tokens", "seq_len", "logits at", "sample"], rows,
                           right=[True, True, False, True, True, True, False])
        if len(ordered.request_ids) > len(rows):
            lines.append(pen.line((f"… {len(ordered.request_ids) - len(rows)} more rows", "dim")))
        lines += pen.paragraph("query_start_loc  ", _numbers(pen, ordered.query_start_loc), hang=2)
        if inputs is not None:
            lines += pen.paragraph("input_ids  ", _numbers(pen, inputs.input_ids), hang=2)
            lines += pen.paragraph("positions  ", _numbers(pen, inputs.positions), hang=2)
    for tables in view.of(TablesGathered):
        for name, row in list(zip(tables.request_ids, tables.block_table, strict=False))[: pen.limits.requests]:
            where = f"block_table[group {tables.group}] "
            lines += pen.paragraph(where, pen.name(name), "  " + _numbers(pen, row), hang=2)
    for meta in view.of(MetadataBuilt):
        shapes = " · ".join(f"{pen.plain(key)} {value}" for key, value in meta.shapes.items())
        lines += pen.paragraph(f"attention metadata, group {meta.group}: ", (pen.plain(meta.backend), "number"),
                               f" · {plural(meta.num_actual_tokens, 'token')} · max_query_len {meta.max_query_len} · "
                               f"max_seq_len {meta.max_seq_len}", (f" · {shapes}" if shapes else "", "dim"), hang=2)
    return lines


def _numbers(pen: Pen, numbers: list[int]) -> str:
    shown = " ".join(map(str, numbers[: pen.limits.chain]))
    return shown + (f" … {len(numbers) - pen.limits.chain} more" if len(numbers) > pen.limits.chain else "")
