"""One step on the console: a panel of sections, or a line."""

from __future__ import annotations

from rich.cells import cell_len
from rich.text import Text

from pagedlab.trace.events import (
    LEVELS,
    BlockCached,
    BlockEvicted,
    BlockFreed,
    KvWritten,
    RequestConsidered,
    RequestFinished,
    RowAssigned,
    SlotsMapped,
    StepFinished,
    StepScheduled,
    StepStarted,
    TextEmitted,
    TokensSampled,
)
from pagedlab.viz.blocks import Group, block_table, changes, next_free, pool_strip
from pagedlab.viz.decisions import decisions, queues, still_refused
from pagedlab.viz.layout import Part, Pen
from pagedlab.viz.requests import finished
from pagedlab.viz.step_view import StepView
from pagedlab.viz.tensors import batch, by_whom, index_chain, launches, written
from pagedlab.viz.text import pad, safe
from pagedlab.viz.tokens import growing_text, percent, sampled
from pagedlab.wording import plural

WIDE = 150  # from here on two columns
DECISIONS, BLOCKS, TENSORS, KERNELS = (LEVELS.index(level) for level in LEVELS[1:])
Texts = dict[str, str]


def panel(pen: Pen, view: StepView, focus: set[str], prompts: Texts, texts: Texts, groups: list[Group], depth: int,
          *, formula: bool) -> list[Text]:
    """All sections of a step; at 150 columns and more what was decided stands beside what it did to the cache."""
    lines = [Text(end=""), _title(pen, view)]
    if pen.width >= WIDE:
        left_pen = pen.narrow((pen.width - 3) * 9 // 20)
        right_pen = pen.narrow(pen.width - 3 - left_pen.width)
        left = _decided(left_pen, view, focus) + _said(left_pen, view, focus, prompts, texts, formula)
        right = _cache(right_pen, view, focus, groups, depth, formula)
        lines += pen.side_by_side(left, right, left_pen.width) if right else left
    else:
        lines += _decided(pen, view, focus) + _cache(pen, view, focus, groups, depth, formula)
        lines += _said(pen, view, focus, prompts, texts, formula)
    if depth >= TENSORS:
        lines += pen.section("batch", batch(pen.inside, view)) + _times(pen, view)
    if depth >= KERNELS:
        lines += pen.section("kernels", launches(pen.inside, view)) + pen.section("wrote", written(pen.inside, view))
    return lines


def _title(pen: Pen, view: StepView) -> Text:
    started, scheduled = view.first(StepStarted), view.first(StepScheduled)
    parts: list[Part] = []
    if started is not None:
        parts = [f"{started.num_running:,} running · {started.num_waiting:,} waiting"]
        used = f"{scheduled.total_num_scheduled_tokens:,} of " if scheduled is not None else ""
        if pen.width >= 60:
            parts.append(f" · {used}{plural(started.token_budget, 'budget token')}")
    return pen.title(f"step {view.step}", *parts)


def _decided(pen: Pen, view: StepView, focus: set[str]) -> list[Text]:
    inside = pen.inside
    lines = pen.section("queues", queues(inside, view)) if view.waiting or len(view.running) > 1 else []
    return lines + pen.section("decided", decisions(inside, view, focus & view.special()))


def _cache(pen: Pen, view: StepView, focus: set[str], groups: list[Group], depth: int, formula: bool) -> list[Text]:
    if depth < BLOCKS:
        return []
    inside = pen.inside
    lines: list[Text] = []
    if view.pool is not None:
        pool = pool_strip(inside, view.pool) + changes(inside, view)
        if formula or view.first(BlockEvicted) or view.first(BlockFreed):
            pool += next_free(inside, view.pool_after or view.pool)
        lines += pen.section("pool", pool)
    shown = [name for name in view.requests if name in focus] or list(view.requests)[:1]
    rows = {event.request_id: event.row for event in view.of(RowAssigned)}
    for mapped in view.of(SlotsMapped):
        rows.update(zip(mapped.request_id, mapped.row, strict=False))
    tables: list[Text] = []
    for name in shown[: pen.limits.tables]:
        tables += block_table(inside, view, name, view.requests[name], groups, view.pool, rows.get(name))
    if hidden := len(view.requests) - len(shown[: pen.limits.tables]):
        tables.append(inside.line((f"… {plural(hidden, 'more request')} in this step", "dim")))
    lines += pen.section("tables", tables)
    return lines + pen.section("index", index_chain(inside, view, formula=formula)
                               + (by_whom(inside, view) if formula or view.of(KvWritten) else []))


def _said(pen: Pen, view: StepView, focus: set[str], prompts: Texts, texts: Texts, explain: bool) -> list[Text]:
    inside = pen.inside
    lines = pen.section("sampled", sampled(inside, view, focus, explain=explain))
    body: list[Text] = []
    emitted = {event.request_id: event.text for event in view.of(TextEmitted)}
    for name in [name for name in view.requests if name in emitted][: pen.limits.requests]:
        body += growing_text(inside, name, prompts.get(name, ""), texts.get(name, ""), emitted[name])
    lines += pen.section("text", body)
    done: list[Text] = []
    for event in view.of(RequestFinished):
        done += finished(inside, event)
    return lines + pen.section("finished", done)


def _times(pen: Pen, view: StepView) -> list[Text]:
    event = view.first(StepFinished)
    if event is None or not event.stage_ns:
        return []
    stages = "   ".join(
        f"{pen.plain(name, 24).replace('_', ' ')} {ns / 1e6:,.2f} ms" for name, ns in event.stage_ns.items()
    )
    return pen.section("time", pen.inside.paragraph((stages, "dim"), hang=2))


# ---------------------------------------------------------------- a step in one line


def condensed(pen: Pen, view: StepView, prompts: Texts, texts: Texts, depth: int) -> list[Text]:
    """Every request computed its latest token and nothing else happened."""
    parts: list[Part] = [(f"step {view.step:<3} ", "rule")]
    events = [event for event in view.of(TokensSampled) if event.kept]
    if len(events) != 1:
        for event in events[: 4 * pen.limits.requests]:
            parts += [pen.name(event.request_id), " ", (pen.token(event.text, event.token_id), "chosen"), "  "]
        if len(events) > 4 * pen.limits.requests:
            parts.append((f"… {len(events) - 4 * pen.limits.requests} more", "dim"))
        for name in sorted(view.growing()) if depth >= BLOCKS else ():
            blocks = [block_id for table in view.requests[name].block_ids for block_id in table[-1:]]
            parts += [" ", pen.name(name), (f" takes {pen.ids(blocks)}", "dim")]
        return [pen.line(*parts, *_still_refused(pen, view))]
    event = events[0]
    parts.append(pen.name(event.request_id))
    refused = _still_refused(pen, view)
    mapped = view.first(SlotsMapped) if depth >= BLOCKS else None
    if mapped is not None and len(mapped.slot) == 1:
        where = f"position {mapped.position[0]} → block {mapped.block_id[0]} + {mapped.offset[0]:<2} → "
        is_tight = refused and pen.width < 110
        parts += [f"  {'' if is_tight else where}slot ", (f"{mapped.slot[0]:<4}", "number")]
    parts += ["  ", (pad(pen.token(event.text, event.token_id, width=12), 12), "chosen"), _chance(event)]
    parts += refused
    for cached in view.of(BlockCached) if depth >= BLOCKS else ():
        parts += ["  ", (pen.glyphs.cached, "cached"), (f" {cached.block_id} full", "dim")]
    whole = prompts.get(event.request_id, "") + texts.get(event.request_id, "")
    used = pen.line(*parts).cell_len
    room = pen.width - max(70, used + 2)
    if whole and room >= 24:
        parts += [" " * (pen.width - room - used), (_tail(whole, room, pen.glyphs.ascii), "dim")]
    return [pen.line(*parts)]


def _still_refused(pen: Pen, view: StepView) -> list[Part]:
    parts: list[Part] = []
    for event in view.of(RequestConsidered):
        if event.outcome == "refused":
            parts += ["  ", *still_refused(pen, event)]
    return parts


def _chance(event: TokensSampled) -> Part:
    return (pad(percent(event.logprob), 7, right=True) if event.logprob is not None else ""), "dim"


def _tail(text: str, width: int, ascii: bool) -> str:
    """The end of a text in ``width`` cells."""
    lead = "~" if ascii else "…"
    for start in range(max(0, len(text) - width), len(text)):
        piece = safe(text[start:], ascii=ascii)
        if cell_len(piece) + 1 <= width:
            return (lead if start else "") + piece
    return lead


def idle(pen: Pen, view: StepView) -> list[Text]:
    """A step that computes nothing still carries news to the worker."""
    scheduled = view.first(StepScheduled)
    done = scheduled.finished_req_ids if scheduled is not None else []
    parts: list[Part] = [(f"step {view.step:<3} ", "rule"), ("nothing to compute", "dim")]
    for i, name in enumerate(done[: pen.limits.requests]):
        parts += ["; the worker hears of the end of " if i == 0 else ", ", pen.name(name)]
    return [pen.line(*parts, *_still_refused(pen, view))]


def step_line(pen: Pen, view: StepView) -> list[Text]:
    """Level ``steps``: counts, the tokens computed and what came out."""
    started, scheduled = view.first(StepStarted), view.first(StepScheduled)
    parts: list[Part] = [(f"step {view.step:<3} ", "rule")]
    if started is not None:
        parts.append(f"{started.num_running:>3} running {started.num_waiting:>3} waiting ")
    if scheduled is not None:
        total = scheduled.total_num_scheduled_tokens
        parts.append(f"{total:>5} {'token ' if total == 1 else 'tokens'} ")
        if scheduled.preempted:
            parts += [("preempted ", "bad"), ", ".join(str(pen.name(name)[0]) for name in scheduled.preempted[:4]), " "]
    for emitted in view.of(TextEmitted)[: pen.limits.requests]:
        parts += ["  ", pen.name(emitted.request_id), " ", (pen.token(emitted.text, 0, width=24), "chosen")]
    lines = [pen.line(*parts)]
    for event in view.of(RequestFinished):
        lines += finished(pen, event)
    return lines
