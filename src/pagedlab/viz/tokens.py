"""The sampler's choice among its candidates, and the text as it grows."""

from __future__ import annotations

import math

from rich.text import Text

from pagedlab.trace.events import TokensSampled
from pagedlab.viz.layout import Part, Pen
from pagedlab.viz.step_view import StepView
from pagedlab.viz.text import pad, safe_lines

BAR = 24  # cells of a bar at 100 %


def percent(logprob: float | None) -> str:
    """``41.0 %``; minus infinity is 0."""
    if logprob is None:
        return "0 %"
    share = 100 * math.exp(min(logprob, 0.0))
    return f"{share:.1f} %" if share >= 0.1 else "<0.1 %"


def bar(pen: Pen, logprob: float | None, width: int) -> str:
    """As long as the probability; eighths of a cell where the glyphs allow."""
    share = 0.0 if logprob is None else math.exp(min(logprob, 0.0))
    glyphs = pen.glyphs.bar
    eighths = round(share * width * len(glyphs))
    full, rest = divmod(eighths, len(glyphs))
    return glyphs[-1] * full + (glyphs[rest - 1] if rest else "")


def sampled(pen: Pen, view: StepView, focus: set[str], *, explain: bool) -> list[Text]:
    """One table per request in focus; the others' tokens in one paragraph."""
    lines: list[Text] = []
    events = view.of(TokensSampled)
    full = [event for event in events if event.request_id in focus] or events[:1]
    full = full[: pen.limits.requests]
    for event in full:
        lines += _one(pen, event)
    rest = [event for event in events if event not in full]
    parts: list[Part] = []
    for event in rest[: pen.limits.requests]:
        chance = f" {percent(event.logprob)}" if event.logprob is not None else ""
        parts += ["   " if parts else "", pen.name(event.request_id), "  ",
                  (pen.token(event.text, event.token_id), "chosen"), (chance, "dim")]
    if len(rest) > pen.limits.requests:
        parts.append((f"   … {len(rest) - pen.limits.requests} more", "dim"))
    lines += pen.paragraph(*parts) if parts else []
    if explain and any(event.kept for event in events):
        lines += pen.paragraph(("a sampled token is known from here on; its key and value are written in the next "
                                "step", "dim"), hang=2)
    return lines


def _one(pen: Pen, event: TokensSampled) -> list[Text]:
    name = pen.name(event.request_id)
    if not event.kept:
        return pen.paragraph(name, "  a sample was drawn and ", ("discarded", "bad"),
                             ": its known tokens are not all computed yet", hang=3)
    candidates = [(c.token_id, c.text, c.logprob) for c in event.top[: pen.limits.candidates]]
    if all(token_id != event.token_id for token_id, _, _ in candidates):
        candidates.insert(0, (event.token_id, event.text, event.logprob))
    if event.logprob is None and not event.top:
        return pen.paragraph(name, "  ", (pen.token(event.text, event.token_id), "chosen"))
    width = min(BAR, max(6, pen.width - 40))
    head = pad(str(name[0]), 4)
    rows: list[list[Part]] = []
    for i, (token_id, text, logprob) in enumerate(candidates):
        is_chosen = token_id == event.token_id
        mark = pen.glyphs.written if is_chosen else " "
        rows.append([
            (head, "request") if i == 0 else "", (mark + pen.token(text, token_id), "chosen" if is_chosen else ""),
            percent(logprob), (bar(pen, logprob, width), "chosen" if is_chosen else "bar"),
        ])
    return pen.table([], rows, right=[False, False, True, False])


def growing_text(pen: Pen, name: str, prompt: str, output: str, new: str) -> list[Text]:
    """Prompt and output; what this step added is marked at the end. A long text shows its tail."""
    ascii = pen.glyphs.ascii
    label = pen.name(name)
    indent = len(str(label[0])) + 2
    room = pen.width - indent
    whole = prompt + output
    lines = safe_lines(whole[-room * (pen.limits.text_lines + 2):], room, ascii=ascii)
    shown = lines[-pen.limits.text_lines:]
    cut = len(lines) > len(shown) or len(whole) > room * (pen.limits.text_lines + 2)
    body: list[Text] = []
    for i, line in enumerate(shown):
        lead: Part = label if i == 0 else " "
        text = pen._text([lead, " " * (indent - (len(str(label[0])) if i == 0 else 1)), line])
        body.append(text)
    if body and new:
        added = safe_lines(new, room, ascii=ascii)
        tail = added[-1].strip("\u200e") if added else ""
        last = body[-1]
        if tail and last.plain.rstrip("\u200e").endswith(tail):
            end = len(last.plain.rstrip("\u200e"))
            last.stylize(pen.theme["chosen"], end - len(tail), end)
    if cut and body:
        body.insert(0, pen.line(" " * indent, (f"… {len(whole):,} characters, the end of them:", "dim")))
    return body
