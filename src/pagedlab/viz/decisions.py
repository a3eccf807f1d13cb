"""The scheduler's decisions in plain words, with the numbers its events carry."""

from __future__ import annotations

from rich.text import Text

from pagedlab.trace.events import (
    CONSIDERED_REASONS,
    NOT_REACHED_REASONS,
    PREFIX_STOPS,
    Event,
    PrefixMatched,
    QueueNotReached,
    RequestConsidered,
    RequestPreempted,
    SlotsAllocated,
    SlotsRefused,
)
from pagedlab.viz.layout import Part, Pen, glue
from pagedlab.viz.step_view import StepView
from pagedlab.wording import are, plural


def more(count: int) -> str:
    return f", … {count:,} more" if count > 0 else ""


def queues(pen: Pen, view: StepView) -> list[Text]:
    """Who waits and who runs when the step begins."""
    lines = []
    for label, names in (("running", view.running), ("waiting", view.waiting)):
        parts: list[Part] = [f"{label}  "]
        for i, name in enumerate(names[: pen.limits.requests]):
            parts += ["" if i == 0 else ", ", pen.name(name)]
            if name in view.waiting_tokens:
                parts.append((f" ({plural(view.waiting_tokens[name], 'token')})", "dim"))
        if len(names) > pen.limits.requests:
            parts.append((f", … {len(names) - pen.limits.requests} more", "dim"))
        lines += pen.paragraph(*(parts if names else [f"{label}  ", ("nobody", "dim")]), hang=9)
    return lines


def decisions(pen: Pen, view: StepView, focus: set[str]) -> list[Text]:
    """Each decision with what led to it indented below; requests with nothing special together in one line."""
    lines: list[Text] = []
    because: list[Event] = []  # what was looked up and tried before the next decision
    plain: list[RequestConsidered] = []
    shown = hidden = 0
    for event in view.events:
        if isinstance(event, PrefixMatched | SlotsAllocated | SlotsRefused | RequestPreempted):
            because.append(event)
        elif isinstance(event, RequestConsidered):
            if event.request_id not in focus and event.outcome == "scheduled":
                plain.append(event)
                because = []
                continue
            if event.request_id not in focus:  # refused for the same reason as in the step before
                lines += _plain(pen, plain) + pen.paragraph(*still_refused(pen, event), hang=3)
                plain, because = [], []
                continue
            lines += _plain(pen, plain)
            plain = []
            if shown >= pen.limits.requests:
                hidden += 1
            else:
                shown += 1
                told_below = any(isinstance(earlier, SlotsRefused) for earlier in because)
                lines += pen.paragraph(*_considered(pen, event, told_below), hang=3)
                lines += _because(pen, because, event.request_id)
            because = []
        elif isinstance(event, QueueNotReached):
            lines += _because(pen, because, None) + _plain(pen, plain)
            because, plain = [], []
            lines += pen.paragraph(*_not_reached(pen, event), hang=3)
    lines += _because(pen, because, None)
    lines += _plain(pen, plain)
    if hidden:
        lines.append(pen.line((f"… {plural(hidden, 'more decision')}", "dim")))
    return lines


def still_refused(pen: Pen, event: RequestConsidered) -> list[Part]:
    needs = f": needs {event.num_needed_blocks}, {event.num_free_blocks} free" if event.num_needed_blocks else ""
    return [pen.name(event.request_id), (f" still waits{needs}", "dim")]


def _because(pen: Pen, events: list[Event], request_id: str | None) -> list[Text]:
    lines: list[Text] = []
    for event in events:
        parts = reason(pen, event)
        if getattr(event, "request_id", None) == request_id:
            parts = parts[2:]  # its name stands above
        lines += pen.paragraph("   ", *parts, hang=5)
    return lines


def _plain(pen: Pen, events: list[RequestConsidered]) -> list[Text]:
    """Requests that compute just the token sampled last."""
    if not events:
        return []
    parts: list[Part] = []
    for i, event in enumerate(events[: pen.limits.requests]):
        parts += ["" if i == 0 else ", ", pen.name(event.request_id)]
    if len(events) > pen.limits.requests:
        parts.append((f", … {len(events) - pen.limits.requests} more", "dim"))
    first = events[0]
    after = (" " + glue(f"[budget {first.budget_before:,} → {events[-1].budget_after:,}]"), "dim")
    if len(events) > 1:
        return pen.paragraph(*parts, "  keep running: 1 token each, the one sampled last", after, hang=3)
    return pen.paragraph(
        *parts, "  keeps running: 1 token, the one sampled last; ",
        f"{first.num_computed_tokens + 1:,} known, {first.num_computed_tokens:,} computed", after, hang=3)


def reason(pen: Pen, event: Event) -> list[Part]:
    """The sentence of an event that led to a decision; it begins with a name and a gap."""
    if isinstance(event, PrefixMatched):
        return _prefix(pen, event)
    if isinstance(event, SlotsAllocated):
        return _allocated(pen, event)
    if isinstance(event, SlotsRefused):
        return _refused(pen, event)
    assert isinstance(event, RequestPreempted)
    return _preempted(pen, event)


def _considered(pen: Pen, event: RequestConsidered, told_below: bool) -> list[Part]:
    reason = CONSIDERED_REASONS.get(event.reason) or pen.plain(event.reason)
    before = f"{plural(event.num_computed_tokens, 'token')} computed before; "
    head: list[Part] = [pen.name(event.request_id), "  "]
    if event.outcome == "scheduled":
        style = "good" if event.num_tokens_granted == event.num_tokens_wanted else "chosen"
        if event.reason == "all_tokens":
            reason = "all it lacked"
        moved = "admitted from waiting: " if event.queue == "waiting" else "keeps running: "
        limit = f" ({event.limit:,})" if event.limit is not None and event.reason != "all_tokens" else ""
        return [
            *head, (moved, style), (f"{event.num_tokens_granted:,}", "number"), " of ",
            plural(event.num_tokens_wanted, "token"), f" granted, {reason}{limit}",
            (f" [{before}" + glue(f"budget {event.budget_before:,} → {event.budget_after:,}]"), "dim"),
        ]
    word = {"refused": "refused", "skipped": "skipped", "preempted": "preempted"}.get(event.outcome, event.outcome)
    numbers = ""
    if not told_below and event.num_needed_blocks is not None and event.num_free_blocks is not None:
        numbers = f": needs {event.num_needed_blocks}, free {event.num_free_blocks}"
    stays = "stays in waiting" if event.queue == "waiting" else "cannot go on"
    return [
        *head, (f"{word}", "bad"), f", {stays}: {reason}{numbers}",
        (f" [wanted {plural(event.num_tokens_wanted, 'token')}; budget {event.budget_before:,}]", "dim"),
    ]


def _prefix(pen: Pen, event: PrefixMatched) -> list[Part]:
    why = PREFIX_STOPS.get(event.why) or pen.plain(event.why)
    found = any(any(group) for group in event.block_ids)
    head: list[Part] = [
        pen.name(event.request_id), "  ", "prefix cache: ",
        (f"{event.num_computed_tokens:,} of {plural(event.num_tokens, 'token')}", "cached" if found else "number"),
    ]
    if found:
        head.append(f" already computed, in block{_s(event.block_ids)} " + _groups(pen, event.block_ids))
    if event.why not in ("caching_off", "prompt_logprobs"):
        head.append(f"; stops before logical block {event.stopped_at_block}")
    head.append(f": {why}")
    notes = []
    if event.hash is not None:
        notes.append(f"looked for {pen.plain(event.hash, 12)}")
    if event.key_differs is not None:
        other = f" from block {event.similar_block_id}" if event.similar_block_id is not None else ""
        notes.append(f"its key differs{other} in {pen.plain(event.key_differs).replace('_', ' ')}")
    if event.evicted_at_step is not None:
        whom = f" for {pen.name(event.evicted_for)[0]}" if event.evicted_for is not None else ""
        notes.append(f"evicted in step {event.evicted_at_step}{whom}")
    if event.group is not None and len(event.block_ids) > 1:
        notes.append(f"group {event.group} cut the hit")
    if notes:
        head.append((f" [{'; '.join(notes)}]", "dim"))
    return head


def _allocated(pen: Pen, event: SlotsAllocated) -> list[Part]:
    new, hits = sum(map(len, event.new_block_ids)), sum(len([b for b in g if b]) for g in event.hit_block_ids)
    head: list[Part] = [pen.name(event.request_id), "  ", "blocks: "]
    if hits:
        left = sum(event.needed_from_free_hits)
        head += [
            (f"{plural(hits, 'hit block')} reused", "cached"), " " + _groups(pen, event.hit_block_ids),
            f" ({left} out of the free queue), ",
        ]
    if new:
        head += [(f"{new} new", "number"), ": " + _groups(pen, event.new_block_ids)]
    else:
        head.append("no new one, the slots it has suffice")
    head.append((" " + glue(f"[{event.num_free_before:,} → {event.num_free_after:,} free]"), "dim"))
    return head


def _refused(pen: Pen, event: SlotsRefused) -> list[Part]:
    hits, new = sum(event.needed_from_free_hits), sum(event.needed_new)
    needed = f"needs {event.num_needed}" if hits else f"needs {plural(new, 'new block')}"
    terms = f" blocks = {hits} cached but free that it hits + {new} new" if hits else ""
    return [
        pen.name(event.request_id), "  ", "blocks: ", (needed, "bad"),
        f"{terms} for {plural(event.num_new_tokens, 'token')}, ", (f"{event.num_free} free", "bad"),
        "; any free block would do, they need not be neighbours",
    ]


def _preempted(pen: Pen, event: RequestPreempted) -> list[Part]:
    whom: list[Part] = ["itself"] if event.on_behalf_of == event.request_id else [pen.name(event.on_behalf_of)]
    blocks = sum(len([b for b in group if b]) for group in event.block_ids)
    parts: list[Part] = [
        pen.name(event.request_id), "  ", ("preempted", "bad"), " on behalf of ", *whom,
        f" (rule: {pen.plain(event.rule)}): gives back {plural(blocks, 'block')} ",
        _groups(pen, event.block_ids), f" and waits again; {plural(event.num_tokens_lost, 'computed token')} must be "
        "computed again, unless the prefix cache still has them",
    ]
    if event.num_tokens_taken_back:
        parts.append(f"; the {plural(event.num_tokens_taken_back, 'token')} granted in this step return to the budget")
    parts.append((f" [{event.num_free_before:,} → {event.num_free_after:,} free; nothing is swapped out]", "dim"))
    return parts


def _not_reached(pen: Pen, event: QueueNotReached) -> list[Part]:
    reason = NOT_REACHED_REASONS.get(event.reason) or pen.plain(event.reason)
    parts: list[Part] = [
        (f"{event.count:,}", "number"), f" in {event.queue} not looked at (from ", pen.name(event.first_request_id),
        f" on): {reason}",
    ]
    if event.head_request_id is not None:
        parts += [" – head ", pen.name(event.head_request_id)]
        if event.num_needed_blocks is not None:
            parts.append(f" needs {plural(event.num_needed_blocks, 'block')}, {are(event.num_free_blocks or 0)} free")
    elif event.limit is not None:
        parts.append(f" (limit {event.limit:,})")
    return parts


def _groups(pen: Pen, groups: list[list[int]]) -> str:
    """Block ids; with several groups, each behind its number."""
    if len(groups) == 1:
        return pen.ids(groups[0])
    return " | ".join(f"group {i}: {pen.ids(ids)}" for i, ids in enumerate(groups) if ids)


def _s(groups: list[list[int]]) -> str:
    return "" if sum(map(len, groups)) == 1 else "s"
