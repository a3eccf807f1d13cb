"""Figures of the engine: a request's way in, and schedule() with its two queues."""

from __future__ import annotations

from pagedlab.figures.pick import only
from pagedlab.figures.record import stored
from pagedlab.figures.svg import Drawing
from pagedlab.figures.symbols import code
from pagedlab.trace.events import (
    CONSIDERED_REASONS,
    NOT_REACHED_REASONS,
    QueueNotReached,
    RequestAdded,
    RequestConsidered,
    RequestPreempted,
    SlotsRefused,
    StepScheduled,
    StepStarted,
    TokensSampled,
)
from pagedlab.trace.state import EngineState
from pagedlab.trace.trace import Trace


def request_path() -> Drawing:
    """A request's way into the engine, and the step that it then takes part in."""
    trace = stored("two-five-three")
    added = only(trace, RequestAdded)
    d = Drawing(
        "A request's way into the engine",
        "Text becomes token ids, ids become a Request with hashed blocks, and the request waits. Nothing has been "
        "computed and no block is taken until schedule() looks at it.",
    )
    first = max(added, key=lambda e: len(e.prompt_token_ids))
    stops = [
        ("your program", code("engine.llm:LLM.generate"), [f"prompt: {first.prompt}"]),
        ("text → ids", code("engine.input_processor:InputProcessor.process"),
         [f"{len(first.prompt_token_ids)} tokens: {', '.join(map(str, first.prompt_token_ids))}"]),
        ("the door", code("engine.core:EngineCore.add_request"),
         ["refuses what can never fit, with the numbers"]),
        ("the queue", code("sched.scheduler:Scheduler.add_request"),
         [f"{first.num_full_blocks} full blocks are hashed", "status WAITING, 0 tokens computed"]),
    ]  # fmt: skip
    for i, (head, name, lines) in enumerate(stops):
        x = 40 + i * 306
        d.card(x, 130, 270, 140, head, lines)
        d.text(x + 14, 258, name, size=12.5, fill="accent", mono=True)
        if i:
            d.arrow(x - 34, 200, x - 3, 200)
    d.text(40, 306, "waiting, in serving order", size=17, weight=650)
    for i, e in enumerate(added):
        _waiting_request(d, 40 + i * 306, 320, e)
    d.arrow(40 + len(added) * 306 - 26, 368, 40 + len(added) * 306 + 18, 368)
    d.paragraph(40 + len(added) * 306 + 28, 354, "until a step has tokens, blocks and a seat for it", 260, fill="dim")
    _step_loop(d, trace, 460)
    d.paragraph(
        40, 662,
        "In vLLM the first two stops run in the front-end process, which sends msgpack over ZMQ; everything else runs "
        "in the engine-core process, execute_model in its workers. Here all are plain calls, in the same order.",
        1200, size=14, fill="dim",
    )  # fmt: skip
    return d


def _waiting_request(d: Drawing, x: float, y: float, added: RequestAdded) -> None:
    d.box(x, y, 270, 96, stroke=added.request_id)
    d.text(x + 14, y + 28, added.request_id, size=18, weight=700, fill=added.request_id)
    texts = added.prompt_token_texts or [str(t) for t in added.prompt_token_ids]
    d.text(x + 50, y + 28, f"{len(texts)} tokens", size=15, fill="dim")
    total = sum(max(len(text.strip()), 2) + 1.5 for text in texts)
    unit, at = min(9.0, 242 / total), x + 14
    for text in texts:
        width = (max(len(text.strip()), 2) + 1.5) * unit
        d.cell(at, y + 44, width - 3, 34, text.strip() or "·", size=min(14, unit * 1.55))
        at += width


def _step_loop(d: Drawing, trace: Trace, y: float) -> None:
    """The three calls of EngineCore.step, with what the first step handed from one to the next."""
    scheduled, sampled = only(trace, StepScheduled, 0)[0], only(trace, TokensSampled, 0)
    d.text(40, y, f"{code('engine.core:EngineCore.step')}, again and again: here its first time", size=17, weight=650)
    granted = ", ".join(f"{k}: {v}" for k, v in scheduled.num_scheduled_tokens.items())
    tokens = ", ".join(f"{e.request_id}: {(e.text or '').strip()!r}" for e in sampled)
    calls = [
        ("1 · who computes how much", [f"tokens this step: {granted}", "and the blocks they need"],
         code("sched.scheduler:Scheduler.schedule")),
        ("2 · the model runs", [f"sampled {tokens}", "keys and values are in the cache now"],
         code("worker.worker:Worker.execute_model")),
        ("3 · requests grow or finish", ["each new token joins its request; who is done gives its blocks back"],
         code("sched.scheduler:Scheduler.update_from_output")),
    ]  # fmt: skip
    for i, (head, lines, name) in enumerate(calls):
        x = 40 + i * 408
        d.card(x, y + 14, 372, 134, head, lines)
        d.text(x + 14, y + 136, name, size=12.5, fill="accent", mono=True)
        if i:
            d.arrow(x - 34, y + 80, x - 3, y + 80)
    d.arrow(1042, y + 150, 226, y + 150, bend=4.5)


def schedule_two_queues() -> Drawing:
    """schedule() and its two queues, in a step that decodes, prefills and admits, and in one that preempts."""
    trace = stored("mixed-batch")
    step = next(
        s for s in sorted(trace.steps) if s >= 0 and len({c.queue for c in only(trace, RequestConsidered, s)}) == 2
    )
    considered = only(trace, RequestConsidered, step)
    d = Drawing(
        "schedule() and its two queues",
        "Running requests first, then the waiting ones, while budget, seats and blocks last. No prefill or decode "
        "phase: each request lets its computed tokens catch up with its known ones.",
    )
    d.text(320, 142, f"step {step} of the scenario mixed-batch", size=16, weight=650)
    _queues(d, 40, 128, "before", trace.at(step=step, after="step_started"))
    _queues(d, 1010, 128, "after", trace.at(step=step, after="step_scheduled"))
    for i, c in enumerate(considered):
        y = 156 + i * 76
        d.box(320, y, 640, 68, stroke=c.request_id)
        d.text(336, y + 27, f"{c.request_id} from {c.queue}", size=17, weight=650, fill=c.request_id)
        d.text(944, y + 27, f"budget {c.budget_before} → {c.budget_after}", size=14, fill="dim", mono=True,
               anchor="end")  # fmt: skip
        d.text(336, y + 53, f"wants {c.num_tokens_wanted}, granted {c.num_tokens_granted}: "
               f"{CONSIDERED_REASONS[c.reason]}", size=15)  # fmt: skip
    d.arrow(275, 290, 315, 290)
    d.arrow(965, 290, 1005, 290)
    _budget(d, trace, step, 406)
    _preempting_step(d, stored("preemption"))
    d.text(320, 488, f"{code('sched.scheduler:Scheduler._schedule_running')} then "
           f"{code('sched.scheduler:Scheduler._schedule_waiting')}", size=14, fill="accent", mono=True)  # fmt: skip
    return d


def _queues(d: Drawing, x: float, y: float, title: str, state: EngineState) -> None:
    d.text(x, y + 14, title, size=16, weight=650)
    for k, (name, queue) in enumerate((("running", state.running), ("waiting", state.waiting))):
        top = y + 28 + k * 158
        d.box(x, top, 230, 150)
        d.text(x + 12, top + 24, name, size=15, fill="dim")
        for i, request_id in enumerate(queue):
            r = state.requests[request_id]
            words = f"{request_id}: {r.num_computed_tokens} of {len(r.token_ids)}"
            d.cell(x + 12, top + 34 + i * 37, 206, 32, words, stroke=request_id, ink=request_id)


def _budget(d: Drawing, trace: Trace, step: int, y: float) -> None:
    started, scheduled = only(trace, StepStarted, step)[0], only(trace, StepScheduled, step)[0]
    total, left = started.token_budget, 320.0
    d.text(320, y, f"the step's budget of {total} tokens", size=15, fill="dim")
    for request_id, granted in scheduled.num_scheduled_tokens.items():
        width = 640 * granted / total
        words = f"{request_id}·{granted}" if width > 44 else granted
        d.cell(left, y + 10, width - 2, 36, words, stroke=request_id, ink=request_id)
        left += width
    if left < 959:
        d.box(left, y + 10, 960 - left, 36, dashed=True)


def _preempting_step(d: Drawing, trace: Trace) -> None:
    """What happens when a running request finds no block."""
    preempted = only(trace, RequestPreempted)[0]
    refused = next(e for e in only(trace, SlotsRefused, preempted.step) if e.request_id == preempted.on_behalf_of)
    passed = only(trace, QueueNotReached, preempted.step)[0]
    lost = preempted.block_ids[0]
    d.line(40, 508, 1240, 508)
    d.text(40, 538, f"when a running request finds no block: step {preempted.step} of the scenario preemption",
           size=16, weight=650)  # fmt: skip
    cards = [
        (f"{refused.request_id} lacks a block", refused.request_id,
         [f"needs {refused.num_needed}, free {refused.num_free}", "allocate_slots() says no"]),
        (f"{preempted.request_id} loses all of its blocks", preempted.request_id,
         [f"rule: {preempted.rule}", f"blocks {lost} go back; {preempted.num_tokens_lost} computed tokens are lost"]),
        (f"{preempted.request_id} waits at the front", preempted.request_id,
         ["with 0 tokens computed; later it computes them again, minus what the prefix cache still holds"]),
        ("and nobody is admitted", "line", [f"{passed.queue}: {NOT_REACHED_REASONS[passed.reason]}"]),
    ]  # fmt: skip
    for i, (head, stroke, lines) in enumerate(cards):
        d.card(40 + i * 306, 556, 282, 130, head, lines, stroke=stroke)
        if i:
            d.arrow(40 + i * 306 - 22, 620, 40 + i * 306 - 2, 620)
