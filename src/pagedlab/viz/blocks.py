"""The block pool as a strip of cells, and the block tables with the text in their blocks."""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from pagedlab.trace.events import BlockAllocated, BlockCached, BlockEvicted, BlockFreed, BlockTouched, TokensSampled
from pagedlab.viz.decisions import more
from pagedlab.viz.layout import GLUE, Part, Pen, glue
from pagedlab.viz.step_view import Pool, RequestView, StepView
from pagedlab.wording import plural

BUSIEST = ("shared", "in_use", "cached", "free", "null")  # which state a cell of several blocks shows
CLUSTER = 16  # cells between two gaps, so that they can be counted; at 80 columns a row has 64
MAX_ROWS = 4


@dataclass(frozen=True)
class Group:
    """Layers that share their block tables."""

    block_size: int
    kind: str = ""  # of attention, with the window; empty where the trace does not say


def cell(pen: Pen, state: str, owners: int = 0) -> tuple[str, str]:
    """The glyph of one block; a shared block shows its number of owners."""
    glyphs = pen.glyphs
    if state == "shared":
        return (str(owners) if owners <= 9 else glyphs.many), "shared"
    return str(getattr(glyphs, state)), state


def pool_strip(pen: Pen, pool: Pool) -> list[Text]:
    """One cell per block where that fits; else each cell stands for several, and says so.

    A tail in which every block is free is told in words instead of drawn.
    """
    last = max([0, *pool.ref_counts, *pool.cached])
    label = len(f"{max(0, min(pool.num_blocks - 1, last + 200)):,}") + 1
    per_row = max(1, (pen.width - label + 1) // (CLUSTER + 1)) * CLUSTER
    if per_row == CLUSTER:  # very narrow
        per_row = max(1, min(CLUSTER, pen.width - label))
    drawn = min(pool.num_blocks, -(-(last + 1) // per_row) * per_row)
    if pool.num_blocks <= 2 * per_row:
        drawn = pool.num_blocks
    size = 1
    while -(-drawn // size) > per_row * MAX_ROWS:
        size *= 2
    lines = []
    for start in range(0, drawn, per_row * size):
        parts: list[Part] = [(f"{start:,}".rjust(label - 1) + " ", "dim")]
        for i, first in enumerate(range(start, min(start + per_row * size, drawn), size)):
            if i and i % CLUSTER == 0:
                parts.append(" ")
            parts.append(_busiest(pen, pool, range(first, min(first + size, drawn))))
        lines.append(pen.line(*parts))
    counts = pool.counts()
    tail = pool.num_blocks - drawn
    says = "1 cell = 1 block" if size == 1 else f"1 cell = {size} blocks, drawn as its busiest"
    if tail > 0:
        lines.append(pen.line((f"… blocks {drawn:,}–{pool.num_blocks - 1:,} are all free", "dim")))
    return lines + pen.paragraph(*_counted(pen, counts), (glue(says), "dim"))


def _counted(pen: Pen, counts: dict[str, int]) -> list[Part]:
    """``■ 2 in use   7 free = □ 3 cached + · 4 blank   ∅ null``: cached blocks are free ones."""

    def one(state: str, word: str, gap: str = "  ") -> list[Part]:
        sign, style = cell(pen, state)
        return [(sign + GLUE, style), glue(f"{counts[state]:,} {word}") + gap]

    parts = one("in_use", "in use")
    if counts["shared"]:  # its sign is a digit, which would read as part of the count
        parts += [(glue(f"{counts['shared']:,} shared (digit = owners)"), "shared"), "  "]
    if counts["cached"]:
        parts += [glue(f"{counts['cached'] + counts['free']:,} free = "), *one("cached", "cached +", GLUE),
                  *one("free", "blank")]
    else:
        parts += one("free", "free")
    return [*parts, (pen.glyphs.null + GLUE, "null"), "null  "] if counts["null"] else parts


def _busiest(pen: Pen, pool: Pool, ids: range) -> Part:
    state = min((pool.state_of(i) for i in ids), key=BUSIEST.index)
    return cell(pen, state, max((pool.ref_counts.get(i, 0) for i in ids), default=0))


def changes(pen: Pen, view: StepView) -> list[Text]:
    """What happened to blocks in this step, in words."""
    parts: list[Part] = []

    def say(label: str, style: str, text: str) -> None:
        parts.extend(["" if not parts else "   ", (label, style), " " + text])

    few = max(2, pen.limits.ids // 2)

    if taken := [e.block_id for e in view.of(BlockAllocated)]:
        say("taken", "in_use", pen.ids(taken))
    if touched := view.of(BlockTouched):
        owners = {e.block_id: e.ref_cnt for e in touched}  # after the last hit
        told = [f"{block_id} ({plural(count, 'owner')})" for block_id, count in owners.items()]
        say("hit", "cached", ", ".join(told[: 2 * few]) + more(len(told) - 2 * few))
    if cached := view.of(BlockCached):
        say("full, now findable", "cached",
            ", ".join(f"{e.block_id} as {pen.plain(e.hash, 9)}" for e in cached[:few]) + more(len(cached) - few))
    if evicted := view.of(BlockEvicted):
        lost = (f"{e.block_id} (lost {pen.plain(e.hash, 9)} to {pen.name(e.request_id)[0]})" for e in evicted[:few])
        say("evicted", "bad", ", ".join(lost) + more(len(evicted) - few))
    lines = pen.paragraph(*parts, hang=2) if parts else []
    return _freed(pen, view, "preempted") + lines + _freed(pen, view, "out_of_window", "aborted", "finished")


def _freed(pen: Pen, view: StepView, *reasons: str) -> list[Text]:
    lines: list[Text] = []
    for reason in reasons:
        freed = [event for event in view.of(BlockFreed) if event.why == reason]
        if not freed:
            continue
        keep = sum(1 for event in freed if event.ref_cnt == 0 and event.hash)
        still = sum(1 for event in freed if event.ref_cnt)
        tail = f": {len(freed) - still} to the tail of the free queue"
        if keep:
            tail += f", {keep} of them still findable until handed out again"
        if still:
            tail += f", {still} still owned by others"
        words = "slid out of the window" if reason == "out_of_window" else reason
        ids = pen.ids(event.block_id for event in freed)
        lines += pen.paragraph(("freed", "free"), f" ({words}) {ids}{tail}", hang=2)
    return lines


def next_free(pen: Pen, pool: Pool) -> list[Text]:
    if not pool.next_free:
        return [pen.line(("free queue is empty", "bad"))]
    parts: list[Part] = [("handed out next  ", "dim")]
    for block_id in pool.next_free:
        state = pool.state_of(block_id)
        parts += [(f"{block_id}{pen.glyphs.cached if state == 'cached' else ''} ", state)]
    if pool.num_free > len(pool.next_free):
        parts.append((f"… {pool.num_free - len(pool.next_free):,} more", "dim"))
    return pen.paragraph(*parts, hang=2)


def block_table(pen: Pen, view: StepView, name: str, row: RequestView, groups: list[Group],
                pool: Pool | None, row_number: int | None) -> list[Text]:
    """Every block of one request: logical block → physical block, and the tokens in its cells."""
    end = row.num_computed_tokens + row.num_scheduled_tokens
    where = f" · row {row_number}" if row_number is not None else ""
    lines = pen.paragraph(
        pen.name(name), f"  {plural(row.num_tokens, 'token')} known · {row.num_computed_tokens:,} computed before · ",
        (f"{pen.glyphs.written}{row.num_scheduled_tokens:,} in this step", "written"), where, hang=3,
    )
    sampled = [event for event in view.about(TokensSampled, name) if event.kept]
    for group, table in enumerate(row.block_ids):
        if len(row.block_ids) > 1:
            lines.append(pen.line((f"group {group}  {pen.plain(groups[group].kind)}".rstrip(), "dim")))
        size = groups[group].block_size
        touched = row.num_computed_tokens // size   # the first block that this step writes to
        for run, when in ((range(min(touched, len(table))), "computed before"),
                          (range(touched, len(table)), "of this step")):
            cut = range(run.start + pen.limits.first_blocks, run.stop - 1)
            if len(cut) < 2:
                cut = range(0)
            for logical in run:
                if logical == cut.start and cut:
                    lines += _hidden(pen, cut, table, size, when)
                if logical not in cut:
                    lines += _one_block(pen, row, logical, table[logical], size, end, sampled, pool)
    return lines


def _hidden(pen: Pen, cut: range, table: list[int], size: int, when: str) -> list[Text]:
    """Blocks left out of a table, counted."""
    ids = [table[logical] for logical in cut]
    kept = [block_id for block_id in ids if block_id]
    parts: list[Part] = [f"  … logical {cut.start}–{cut.stop - 1}"]
    if nulls := len(ids) - len(kept):
        parts.append((f" → {nulls} {pen.glyphs.null} null (out of the window)", "null"))
    if kept:
        parts.append(f" → blocks {pen.ids(kept)}, full: {plural(len(kept) * size, 'token')} {when}")
    return pen.paragraph(*parts, hang=4)


def _one_block(pen: Pen, row: RequestView, logical: int, block_id: int, size: int, end: int,
               sampled: list[TokensSampled], pool: Pool | None) -> list[Text]:
    state = pool.state_of(block_id) if pool is not None else ("null" if block_id == 0 else "in_use")
    owners = pool.ref_counts.get(block_id, 0) if pool is not None else 0
    if block_id == 0:
        return [pen.line(f"  {logical} → ", cell(pen, "null"), (" null block: slid out of the window", "dim"))]
    head: list[Part] = [f"  {logical} → block ", (str(block_id), "number"), " ", cell(pen, state, owners), " "]
    width = sum(cell_len(part if isinstance(part, str) else part[0]) for part in head)
    if pen.glyphs.ascii:
        width += 1
    cells: list[Text] = []
    for offset in range(size):
        cells.append(pen._text(_cell_parts(pen, row, logical * size + offset, end, sampled)))
    empty = 0
    while empty < size and cells[size - 1 - empty].plain == pen.glyphs.empty:
        empty += 1
    lines, line = [], pen._text(head)
    used = width
    bar = pen._text([(pen.glyphs.cell, "dim")])
    for text in cells[: size - empty]:
        if used + text.cell_len + 1 > pen.width and used > width:
            lines.append(line)
            line, used = Text(" " * width, no_wrap=True, end=""), width
        line.append_text(text)
        line.append_text(bar)
        used += text.cell_len + 1
    if empty:
        tail = f"{empty} empty"
        room = pen.width - used
        strip = pen.glyphs.empty * min(empty, max(room, 1))
        line.append_text(pen._text([(strip, "empty")]))
        used += len(strip)
        if used + len(tail) + 1 <= pen.width and empty > 1:
            line.append_text(pen._text([(" " + tail, "dim")]))
    lines.append(line)
    return lines


def _cell_parts(pen: Pen, row: RequestView, position: int, end: int, sampled: list[TokensSampled]) -> list[Part]:
    """computed before: plain; computed in this step: ▸; known without a key and value yet: ( ); else empty."""
    glyphs = pen.glyphs
    if position < row.num_tokens:
        token_id, text = row.token(position)
    elif position - row.num_tokens < len(sampled):
        event = sampled[position - row.num_tokens]
        token_id, text = event.token_id, event.text
    else:
        return [(glyphs.empty, "empty")]
    shown = pen.token(text, token_id, width=max(4, min(14, pen.width - 20)))
    if position < row.num_computed_tokens:
        return [(shown, "computed")]
    if position < end:
        return [(glyphs.written + shown, "written")]
    return [(glyphs.known[0] + shown + glyphs.known[1], "known")]
