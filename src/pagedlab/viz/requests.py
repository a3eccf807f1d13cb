"""Requests at the door and at the end, and how the whole trace ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from pagedlab.trace.events import LEVELS, Event, PrefixCacheReset, RequestAdded, RequestFinished, RequestRefused, Scalar
from pagedlab.trace.state import EngineState
from pagedlab.viz.blocks import pool_strip
from pagedlab.viz.layout import Part, Pen
from pagedlab.viz.step_view import Pool
from pagedlab.viz.text import safe_lines
from pagedlab.wording import plural

if TYPE_CHECKING:
    from pagedlab.viz.terminal import Story

FINISH_REASONS = {
    "stop": "a stop token or end-of-text was sampled",
    "length": "max_tokens or max_model_len is reached",
    "abort": "cancelled from outside, or a stop string was found",
    "error": "ended by the engine's guard: it could never go on",
}


def added(pen: Pen, event: RequestAdded, *, tokens: bool, max_model_len: Scalar = None) -> list[Text]:
    """A request enters the waiting queue; its tokens, with the cuts between them."""
    parts: list[Part] = [pen.name(event.request_id), f"  {plural(len(event.prompt_token_ids), 'prompt token')}"]
    wanted = []
    for key, label in (("max_tokens", "up to {} more"), ("temperature", "temperature {}"), ("top_p", "top_p {}"),
                       ("top_k", "top_k {}"), ("min_p", "min_p {}"), ("seed", "seed {}")):
        value = event.sampling.get(key)
        if isinstance(value, int | float) and not (key in ("top_p",) and value == 1) and not (
            key in ("top_k", "min_p") and value == 0
        ):
            wanted.append("greedy" if key == "temperature" and value == 0 else label.format(f"{value:g}"))
    asked = event.sampling.get("max_tokens")
    if type(max_model_len) is int and type(asked) is int and len(event.prompt_token_ids) + asked > max_model_len:
        room = max_model_len - len(event.prompt_token_ids)
        wanted[0] = f"up to {room:,} more (asked for {asked:,}, but max_model_len is {max_model_len:,})"
    if event.priority:
        wanted.append(f"priority {event.priority}")
    if event.cache_salt is not None:
        wanted.append("with a cache salt")
    parts.append((" · " + " · ".join(wanted) if wanted else "", "dim"))
    inside = pen.inside
    lines = inside.paragraph(*parts, hang=3)
    if tokens:
        limit = pen.limits.prompt
        texts: list[str | None] = list(event.prompt_token_texts or []) or [None] * len(event.prompt_token_ids)
        cells: list[Part] = ["   "]
        for token_id, text in list(zip(event.prompt_token_ids, texts, strict=False))[:limit]:
            cells += [inside.token(text, token_id), (pen.glyphs.cell + " ", "dim")]
        if len(event.prompt_token_ids) > limit:
            cells.append((f"… {len(event.prompt_token_ids) - limit} more", "dim"))
        lines += inside.paragraph(*cells, hang=3)
    return pen.section("arrives", lines)


def other(pen: Pen, event: Event) -> list[Text]:
    """A request that was refused at the door; a reset of the prefix cache."""
    inside = pen.inside
    if isinstance(event, RequestRefused):
        return pen.section("refused", inside.paragraph(
            inside.name(event.request_id), "  ", ("never entered: ", "bad"), inside.plain(event.message), hang=3))
    assert isinstance(event, PrefixCacheReset)
    done = ("all cached blocks forgotten" if event.done
            else f"refused: {plural(event.num_used_blocks, 'block')} in use")
    return pen.section("reset", inside.paragraph("prefix cache: ", (done, "good" if event.done else "bad")))


def finished(pen: Pen, event: RequestFinished) -> list[Text]:
    why = FINISH_REASONS.get(event.finish_reason) or pen.plain(event.finish_reason)
    parts: list[Part] = [
        pen.name(event.request_id), "  ",
        (pen.plain(event.finish_reason, 20), "bad" if event.finish_reason == "error" else "good"),
        f" ({why}): {event.num_prompt_tokens:,} prompt + {plural(event.num_output_tokens, 'output token')}",
    ]
    if event.num_cached_tokens:
        parts.append(f", {event.num_cached_tokens:,} from the prefix cache")
    if event.num_preemptions:
        parts.append(f", preempted {plural(event.num_preemptions, 'time')}")
    if event.stop_reason is not None:
        parts.append(f"; stopped by {pen.plain(str(event.stop_reason), 24)}")
    if event.numbers:
        parts.append((" [" + ", ".join(f"{pen.plain(key, 30)} {pen.plain(str(value), 20)}"
                                       for key, value in event.numbers.items()) + "]", "dim"))
    return pen.paragraph(*parts, hang=3)


def ending(pen: Pen, story: Story, state: EngineState | None, depth: int, engine: int | None) -> list[Text]:
    """Every request's whole text, who is left, and what the pool still holds."""
    name = "end" if engine is None else f"end of engine {engine}"
    if not story.num_steps:
        return [pen.line(("no step in this trace", "dim"))]
    lines = [Text(end=""), pen.title(
        name, f"{plural(story.num_steps, 'step')} · {plural(story.num_scheduled_tokens, 'token')} computed")]
    inside = pen.inside
    body: list[Text] = []
    for event in story.finished:
        body += finished(inside, event)
        prompt, output = story.prompts.get(event.request_id, ""), story.texts.get(event.request_id, "")
        body += _whole_text(inside, prompt, output)
    lines += pen.section("finished", body)
    if state is None:
        return lines
    left: list[Text] = []
    for request in state.requests.values():
        left += inside.paragraph(
            inside.name(request.request_id), f"  {inside.plain(request.status, 16)}: "
            f"{request.num_computed_tokens:,} of {plural(len(request.token_ids), 'token')} computed", hang=3)
    lines += pen.section("left", left)
    if depth >= LEVELS.index("blocks") and state.num_blocks:
        pool = pool_strip(inside, Pool.of(state))
        if state.cached_blocks:
            pool += inside.paragraph(("cached blocks keep their content until they are handed out again; the next "
                                      "prompt with the same beginning can hit them", "dim"), hang=2)
        lines += pen.section("pool", pool)
    return lines


def _whole_text(pen: Pen, prompt: str, output: str) -> list[Text]:
    """Up to the limit of lines, the beginning and the end."""
    ascii = pen.glyphs.ascii
    lines = safe_lines((prompt + output)[: 200 * pen.width], pen.width - 3, ascii=ascii)
    limit = 2 * pen.limits.text_lines
    if len(lines) > limit:
        hidden = len(lines) - limit
        lines = [*lines[: limit // 2], f"{'...' if ascii else '…'} {hidden} more lines", *lines[-(limit // 2):]]
    return [pen.line("   ", line) for line in lines]
