"""``pagedlab why``: what happened to a request, in words, with the numbers of the branch that decided.

Nothing is guessed after the fact: every sentence restates an event of the trace.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pagedlab.errors import UserError
from pagedlab.trace.events import (
    CONSIDERED_REASONS,
    PREFIX_STOPS,
    Event,
    PrefixMatched,
    QueueNotReached,
    RequestAborted,
    RequestAdded,
    RequestConsidered,
    RequestFinished,
    RequestOutput,
    RequestPreempted,
    RequestRefused,
    SlotsRefused,
    StepScheduled,
    StepStarted,
    TokensSampled,
)
from pagedlab.trace.trace import StepTrace, Trace, request_ids_of
from pagedlab.wording import plural

E = TypeVar("E", bound=Event)


@dataclass
class Answer:
    """Sentences for people, and the same as data."""

    lines: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)


def why(trace: Trace, request_id: str, step: int | None = None) -> Answer:
    """The request's journey, or with ``step`` what was decided about it then and why.

    Raises:
        UserError: recorded below `decisions`, or no such request or step.
    """
    trace.need("decisions", "why")
    if request_id not in trace.requests and not _was_there_before(trace, request_id):
        raise UserError(trace.no_request(request_id))
    if step is None:
        return journey(trace, request_id)
    if step not in trace.steps or step < 0:
        raise UserError(trace.no_step(step))
    return explain_step(trace, request_id, trace.steps[step])


def _was_there_before(trace: Trace, request_id: str) -> bool:
    snapshot = trace.first_snapshot
    return snapshot is not None and any(r.request_id == request_id for r in snapshot.requests)


# ------------------------------------------------------------------ one step


def explain_step(trace: Trace, request_id: str, step: StepTrace) -> Answer:
    """Why the request got what it got in this step."""
    answer = Answer(data={"request_id": request_id, "step": step.step})
    mine = [e for e in step if request_id in request_ids_of(e)]
    considered = _last(mine, RequestConsidered)
    preempted = next((e for e in mine if type(e) is RequestPreempted and e.request_id == request_id), None)
    if matched := _last(mine, PrefixMatched):
        answer.lines += _prefix_lines(matched)
        answer.data["prefix"] = {"num_hit_tokens": matched.num_computed_tokens, "why": matched.why}
    if considered is not None and (preempted is None or considered.seq > preempted.seq) and (
        considered.outcome != "preempted"
    ):
        answer.lines += _considered_lines(step, considered)
        answer.data.update(outcome=considered.outcome, reason=considered.reason, wanted=considered.num_tokens_wanted,
                           granted=considered.num_tokens_granted)
    if preempted is not None:
        answer.lines += _preempted_lines(step, preempted)
        answer.data.update(outcome="preempted", reason=preempted.rule, on_behalf_of=preempted.on_behalf_of,
                           num_tokens_lost=preempted.num_tokens_lost)
    if considered is None and preempted is None:
        _explain_absence(trace, request_id, step, answer)
    texts = {e.token_id: e.text for e in mine if type(e) is TokensSampled}
    for event in mine:
        if type(event) is RequestOutput and event.new_token_ids:
            tokens = (f"{i}" if texts.get(i) is None else f"{i} {texts[i]!r}" for i in event.new_token_ids)
            answer.lines.append(f"The step brought it token {', '.join(tokens)}.")
        elif type(event) is RequestFinished and event.finish_reason != "abort":
            answer.lines.append(f"It finished in this step ({_finish_words(event)}).")
        elif type(event) is RequestAborted:
            answer.lines.append(f"It was cancelled after this step, while {event.queue}.")
    return answer


def _considered_lines(step: StepTrace, e: RequestConsidered) -> list[str]:
    who = e.request_id
    if e.outcome == "scheduled":
        first = "was admitted" if e.queue == "waiting" else "was running"
        if e.num_tokens_granted >= e.num_tokens_wanted:
            return [f"{who} {first} and got {_granted(e)}, which left {e.budget_after} of the budget."]
        numbers = f"{_tokens(e.budget_before)}{_spent_before(step, e)}"
        if e.reason != "token_budget" and e.limit is not None:
            numbers = f"{e.limit}"
        return [f"{who} {first} and got {_granted(e)} ({numbers})."]
    if e.reason == "not_enough_free_blocks":
        return [f"{who} was looked at in the {e.queue} queue and refused: {_shortage(step, who)}."]
    if e.reason == "chunked_prefill_off":
        piece = "" if e.limit is None else f" (of {e.num_tokens_wanted}, cut to long_prefill_token_threshold)"
        return [f"{who} was looked at and refused: it wants {_tokens(e.limit or e.num_tokens_wanted)} in one piece"
                f"{piece}, {e.budget_before} of the budget were left, and chunked prefill is off."]
    because = CONSIDERED_REASONS.get(e.reason, e.reason)
    return [f"{who} was looked at in the {e.queue} queue and {e.outcome}: {because}."]


def _preempted_lines(step: StepTrace, e: RequestPreempted) -> list[str]:
    num_freed = e.num_free_after - e.num_free_before
    num_held = sum(block_id != 0 for ids in e.block_ids for block_id in ids)
    kept = f" of {num_held}" if num_held > num_freed else ""
    first = f"{e.request_id} was preempted for {_whom(e)} ({_shortage(step, e.on_behalf_of)})"
    lines = [f"{first}; the rule chose {e.rule}.",
             f"It lost {_tokens(e.num_tokens_lost)} of computed KV; {num_freed}{kept} of its blocks went to the free "
             f"queue ({e.num_free_before} free before, {e.num_free_after} after)."]
    if kept:
        lines.append("The others are shared and still held.")
    if e.num_tokens_taken_back:
        lines.append(f"What it had been granted in this same step, {_tokens(e.num_tokens_taken_back)}, was taken back.")
    return lines


def _explain_absence(trace: Trace, request_id: str, step: StepTrace, answer: Answer) -> None:
    """No event of the step's schedule() names the request."""
    request = trace.requests.get(request_id)
    events = request.events if request is not None else []
    started = next((e.seq for e in step if type(e) is StepStarted), step.events[0].seq)
    came = next((e for e in events if type(e) in (RequestAdded, RequestRefused)), None)
    ended = next((e for e in events if type(e) is RequestFinished and e.seq < started), None)
    if type(came) is RequestRefused:
        answer.lines.append(f"{request_id} never entered: {came.message}")
        answer.data.update(outcome="refused_at_the_door", reason=came.reason)
    elif came is not None and came.seq > started:
        answer.lines.append(f"{request_id} was not there yet: it was added after step {came.step} had begun.")
        answer.data["outcome"] = "not_added_yet"
    elif ended is not None:
        answer.lines.append(f"{request_id} had already finished, in step {ended.step} ({_finish_words(ended)}).")
        answer.data["outcome"] = "finished_before"
    else:
        queue = _queue_before(_queue_changes(trace, request_id), started)
        missed = next((e for e in step if type(e) is QueueNotReached and e.queue == queue), None)
        if missed is None:
            answer.lines.append(f"The trace ends before step {step.step} decided about {request_id}.")
            return
        answer.data.update(outcome="not_reached", queue=queue, reason=missed.reason)
        first = "it stood first" if missed.first_request_id == request_id else f"from {missed.first_request_id} on"
        answer.lines.append(f"{request_id} was {queue} and was not looked at: {_not_reached_words(step, missed)}.")
        answer.lines.append(f"{missed.count} {queue} request{'s were' if missed.count > 1 else ' was'} not reached "
                            f"({first}).")


def _queue_changes(trace: Trace, request_id: str) -> list[tuple[int, str]]:
    """(seq, queue it is in from then on), ascending."""
    snapshot = trace.first_snapshot
    running = snapshot is not None and request_id in snapshot.running
    changes = [(-1, "running" if running else "waiting")]
    for e in trace.requests.get(request_id, ()):
        if type(e) is RequestConsidered and e.outcome == "scheduled":
            changes.append((e.seq, "running"))
        elif type(e) is RequestPreempted and e.request_id == request_id:
            changes.append((e.seq, "waiting"))
    return changes


def _queue_before(changes: list[tuple[int, str]], seq: int) -> str:
    return changes[bisect_left(changes, (seq, "")) - 1][1]


def _not_reached_words(step: StepTrace, e: QueueNotReached) -> str:
    if e.reason == "token_budget_exhausted":
        granted = _grants(step)
        spent = f" ({_list(f'{r} {n}' for r, n in granted.items())})" if granted else ""
        return f"the step's budget of {_tokens(sum(granted.values()))} was used up before its turn{spent}"
    if e.reason == "max_num_seqs_reached":
        return f"all {e.limit} seats were taken"
    if e.reason == "head_blocked":
        head = e.head_request_id or "the head"
        refused = next((c for c in step if type(c) is RequestConsidered and c.request_id == head), None)
        because = _shortage(step, head)
        if refused is not None and refused.reason != "not_enough_free_blocks":
            because = CONSIDERED_REASONS.get(refused.reason, refused.reason)
        return f"{head} stands at the head of the queue and could not be scheduled ({because}), and nobody overtakes it"
    preempted = [p for p in step if type(p) is RequestPreempted]
    if e.reason == "preemption_this_step":
        names = _list(f"{p.request_id} for {_whom(p)}" for p in preempted)
        return f"the step preempted ({names}), and a step that preempts admits no one"
    if e.reason == "self_preemption":
        name = preempted[-1].request_id if preempted else "a running request"
        return f"{name} needed a block and was itself the victim, which ends the scan of the running list"
    return e.reason


def _prefix_lines(e: PrefixMatched) -> list[str]:
    """What the prefix cache gave, and why no more."""
    hit = f"Prefix cache: {e.num_computed_tokens} of its {_tokens(e.num_tokens)} hit"
    ids = "; ".join(_list(map(str, ids)) for ids in e.block_ids if ids)
    if ids:
        hit += f" (block {ids})"
    because = _why_no_more(e)
    lines = [f"{hit}; it stopped at block {e.stopped_at_block}: {because}."]
    if e.why in ("caching_off", "prompt_logprobs"):
        return [f"Prefix cache: not asked, {because}."]
    if e.evicted_at_step is not None:
        lines.append(f"Block {e.similar_block_id} held that key (hash {e.hash}) until step {e.evicted_at_step}, when "
                     f"it was handed to {e.evicted_for}.")
    elif e.key_differs is not None:
        lines.append(f"Block {e.similar_block_id} comes closest to the key (hash {e.hash}): {_DIFFERS[e.key_differs]}.")
    if e.group is not None and len(e.block_ids) > 1:
        lines.append(f"KV-cache group {e.group} is the one that cut the hit.")
    return lines


def _why_no_more(e: PrefixMatched) -> str:
    rest = e.num_tokens - e.num_computed_tokens
    if e.why == "partial_block":
        what = f"the rest, {_tokens(rest)}," if e.num_computed_tokens else f"all its {_tokens(e.num_tokens)}"
        return f"{what} cannot fill a block of {e.block_size}, and only full blocks are reusable"
    if e.why == "last_token_must_be_computed":
        return f"the last token must be computed to get logits, and hits are whole blocks, so {_tokens(rest)} remain"
    return PREFIX_STOPS.get(e.why, e.why)


_DIFFERS = {
    "tokens": "what came before is the same, but its tokens are others",
    "parent": "its tokens are the same, but what came before is different",
    "cache_salt": "its tokens are the same, but its cache salt is another",
}


def _shortage(step: StepTrace, request_id: str) -> str:
    """The numbers of the request's first refusal in the step."""
    e = next((e for e in step if type(e) is SlotsRefused and e.request_id == request_id), None)
    if e is None:
        return "it needs more blocks than are free"
    parts = f"{sum(e.needed_new)} new" + (
        f" + {sum(e.needed_from_free_hits)} hit but free" if sum(e.needed_from_free_hits) else ""
    )
    needs = "needs" if e.num_new_tokens == 1 else "need"
    free = f"{e.num_free} {'is' if e.num_free == 1 else 'are'} free"
    return f"{_tokens(e.num_new_tokens)} {needs} {_blocks(e.num_needed)} ({parts}) and {free}"


def _grants(step: StepTrace) -> dict[str, int]:
    return next((dict(e.num_scheduled_tokens) for e in step if type(e) is StepScheduled), {})


def _spent_before(step: StepTrace, e: RequestConsidered) -> str:
    spent = {c.request_id: c.num_tokens_granted for c in step
             if type(c) is RequestConsidered and c.seq < e.seq and c.num_tokens_granted}
    return f" after {_list(f'{r} {n}' for r, n in spent.items())}" if spent else ""


# ------------------------------------------------------------------ the whole journey


@dataclass
class _Row:
    """One line of a journey; neighbours with the same ``alike`` become one."""

    seq: int
    step: int
    text: str
    alike: str = ""
    last_step: int = -1
    after: bool = False  # between this step and the next


def journey(trace: Trace, request_id: str) -> Answer:
    """One line per step that changed something; steps alike in a row share a line."""
    totals = {"queue_steps": 0, "queue_ns": 0, "num_cached_tokens": 0, "num_recomputed_tokens": 0,
              "num_preemptions": 0, "num_output_tokens": 0}
    events = trace.requests[request_id].events if request_id in trace.requests else []
    rows = _rows_of_snapshot(trace, request_id)
    for e in events:
        if type(e) is RequestPreempted and e.request_id == request_id and e.num_tokens_taken_back:
            rows.pop()  # the grant of this same step, which never came about
        rows += _rows_of_event(trace, request_id, e)
    rows += _rows_not_reached(trace, request_id, events)
    _add_up(trace, request_id, events, totals)
    answer = Answer(_merged(rows), {"request_id": request_id, **totals})
    if not any(type(e) is RequestRefused for e in events):
        answer.lines.append(
            f"In all: {_steps(totals['queue_steps'])} in the queue ({totals['queue_ns'] / 1e6:.1f} ms), "
            f"{_tokens(totals['num_cached_tokens'])} from the prefix cache, {totals['num_recomputed_tokens']} "
            f"recomputed after {plural(totals['num_preemptions'], 'preemption')}, "
            f"{totals['num_output_tokens']} generated."
        )
    return answer


def _rows_of_snapshot(trace: Trace, request_id: str) -> list[_Row]:
    snapshot = trace.first_snapshot
    known = next((r for r in snapshot.requests if r.request_id == request_id), None) if snapshot is not None else None
    if snapshot is None or known is None:
        return []
    progress = f"{known.num_computed_tokens} of {_tokens(len(known.token_ids))} computed"
    text = f"when tracing began it was {known.status}, {progress}"
    return [_Row(snapshot.seq, snapshot.step, text, after=True)]


def _rows_of_event(trace: Trace, request_id: str, e: Event) -> list[_Row]:
    match e:
        case RequestAdded():
            return [_Row(e.seq, e.step, f"added with {_tokens(len(e.prompt_token_ids))}", after=True)]
        case RequestRefused():
            return [_Row(e.seq, e.step, f"never entered: {e.message.rstrip('.')}", after=True)]
        case RequestConsidered(queue="waiting", outcome="scheduled"):
            hit = f"{_tokens(e.num_computed_tokens)} from the prefix cache, " if e.num_computed_tokens else ""
            return [_Row(e.seq, e.step, f"admitted: {hit}got {_granted(e)}{_lost_hit(trace, e)}")]
        case RequestConsidered(outcome="scheduled"):
            decode = e.num_tokens_wanted == e.num_tokens_granted == 1
            return [_Row(e.seq, e.step, "1 token" if decode else f"got {_granted(e)}", "decode" if decode else "")]
        case RequestConsidered(outcome="refused" | "skipped"):
            because = CONSIDERED_REASONS.get(e.reason, e.reason)
            if e.reason == "not_enough_free_blocks":
                because = _shortage(trace.steps[e.step], request_id)
            return [_Row(e.seq, e.step, f"not scheduled: {because}", because)]
        case RequestPreempted() if e.request_id == request_id:
            lost = f"{_tokens(e.num_tokens_lost)} of KV lost"
            return [_Row(e.seq, e.step, f"preempted for {_whom(e)}, {lost} (chosen: {e.rule})")]
        case RequestAborted():
            return [_Row(e.seq, e.step, f"cancelled while {e.queue}", after=True)]
        case RequestFinished() if e.finish_reason != "abort":
            return [_Row(e.seq, e.step, f"finished: {_finish_words(e)}")]
    return []


def _lost_hit(trace: Trace, admitted: RequestConsidered) -> str:
    """Why the prefix cache gave nothing, or, where it had something close, why it was not that."""
    mine = [e for e in trace.steps[admitted.step] if getattr(e, "request_id", None) == admitted.request_id]
    matched = _last(mine, PrefixMatched)
    if matched is None:
        return ""
    if matched.why not in ("evicted", "reset") and matched.key_differs is None:
        return "" if matched.num_computed_tokens else f"; no prefix hit: {_why_no_more(matched)}"
    sentence = _prefix_lines(matched)[-1].rstrip(".")
    return f"; the hit stopped at block {matched.stopped_at_block}: {sentence[0].lower()}{sentence[1:]}"


def _rows_not_reached(trace: Trace, request_id: str, events: list[Event]) -> list[_Row]:
    """Steps in which the request was there and the scan ended before it."""
    rows = []
    added = next((e.seq for e in events if type(e) is RequestAdded), -1)
    finished = next((e.seq for e in events if type(e) is RequestFinished), trace.events[-1].seq)
    named = {e.step for e in events
             if type(e) is RequestConsidered or (type(e) is RequestPreempted and e.request_id == request_id)}
    changes = _queue_changes(trace, request_id)
    for number, step in trace.steps.items():
        started = next((e.seq for e in step if type(e) is StepStarted), None)
        if number in named or started is None or not added < started < finished:
            continue
        queue = _queue_before(changes, started)
        missed = next((e for e in step if type(e) is QueueNotReached and e.queue == queue), None)
        if missed is not None:
            words = _not_reached_words(step, missed)
            rows.append(_Row(missed.seq, number, f"{queue}, not reached: {words}", words))
    return rows


def _add_up(trace: Trace, request_id: str, events: list[Event], totals: dict[str, int]) -> None:
    """Queue time, cached and recomputed tokens, from the request's own events."""
    waiting_since: Event | None = None
    if request_id not in {e.request_id for e in events if type(e) is RequestAdded}:
        snapshot = trace.first_snapshot
        waiting_since = snapshot if snapshot is not None and request_id in snapshot.waiting else None
    furthest, before, again = 0, 0, 0  # most tokens ever computed, also before the latest grant; recomputed by it
    for e in (*events, trace.events[-1]):
        if waiting_since is not None and e.seq > waiting_since.seq and (
            type(e) in (RequestAborted, RequestFinished) or e is trace.events[-1] or _is_admission(e)
        ):
            totals["queue_steps"] += e.step - waiting_since.step - (1 if _is_admission(e) else 0)
            totals["queue_ns"] += e.t_ns - waiting_since.t_ns
            waiting_since = None
        if type(e) is RequestAdded:
            waiting_since = e
        elif type(e) is RequestConsidered and e.outcome == "scheduled":
            totals["num_cached_tokens"] += e.num_computed_tokens if e.queue == "waiting" else 0
            reaches = e.num_computed_tokens + e.num_tokens_granted
            before, again = furthest, max(min(reaches, furthest) - e.num_computed_tokens, 0)
            totals["num_recomputed_tokens"] += again
            furthest = max(furthest, reaches)
        elif type(e) is RequestPreempted and e.request_id == request_id:
            waiting_since = e
            totals["num_preemptions"] += 1
            if e.num_tokens_taken_back:
                totals["num_recomputed_tokens"] -= again
                furthest = before
        elif type(e) is RequestOutput:
            totals["num_output_tokens"] += len(e.new_token_ids)


def _is_admission(e: Event) -> bool:
    return type(e) is RequestConsidered and e.queue == "waiting" and e.outcome == "scheduled"


def _merged(rows: list[_Row]) -> list[str]:
    """In order of time; neighbouring rows that say the same become one."""
    merged: list[_Row] = []
    for row in sorted(rows, key=lambda row: row.seq):
        row.last_step = row.step
        if merged and row.alike and merged[-1].alike == row.alike and merged[-1].last_step == row.step - 1:
            merged[-1].last_step = row.step
        else:
            merged.append(row)
    lines = []
    for row in merged:
        when = f"steps {row.step}-{row.last_step}" if row.last_step > row.step else f"step {row.step}"
        if row.after:
            when = f"after step {row.step}" if row.step >= 0 else "before step 0"
        text = "1 token each" if row.alike == "decode" and row.last_step > row.step else row.text
        lines.append(f"{when}: {text}")
    return lines


def _granted(e: RequestConsidered) -> str:
    if e.num_tokens_granted >= e.num_tokens_wanted:
        number = e.num_tokens_granted
        return "the one token it lacked" if number == 1 else f"all {number} tokens it lacked"
    because = CONSIDERED_REASONS.get(e.reason, e.reason)
    return f"{e.num_tokens_granted} of the {_tokens(e.num_tokens_wanted)} it wanted, {because}"


def _whom(e: RequestPreempted) -> str:
    return "itself" if e.on_behalf_of == e.request_id else e.on_behalf_of


def _finish_words(e: RequestFinished) -> str:
    reason = e.finish_reason if e.stop_reason is None else f"{e.finish_reason} at {e.stop_reason!r}"
    numbers = f"; {_list(f'{k} {v}' for k, v in e.numbers.items())}" if e.numbers else ""
    return f"{reason} after {e.num_prompt_tokens} prompt and {plural(e.num_output_tokens, 'output token')}{numbers}"


def _last(events: list[Event], cls: type[E]) -> E | None:
    return next((e for e in reversed(events) if type(e) is cls), None)


def _tokens(n: int) -> str:
    return f"{n} token{'s' * (n != 1)}"


def _blocks(n: int) -> str:
    return f"{n} block{'s' * (n != 1)}"


def _steps(n: int) -> str:
    return f"{n} step{'s' * (n != 1)}"


def _list(items: Any, most: int = 8) -> str:
    listed = list(items)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
