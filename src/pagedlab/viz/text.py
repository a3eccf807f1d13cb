"""A stranger's text, made safe to print: nothing in it moves the cursor, hides, reorders or widens.

A prompt, a token, a request id or a model name may hold anything a trace file can hold. Each
character becomes a *symbol*: itself where every terminal agrees on its width, else something visible
that says what it was. Symbols are one or two cells wide, and only whole symbols are cut off.

========================  =====================  ============
what                      shown as               in ASCII
========================  =====================  ============
newline, tab, return      ⏎ ⇥ ␍                  <LF> <TAB> …
other control characters  ␛ ␇ … ⟨9B⟩             <ESC> <9B>
bidi overrides, joiners   ⟨202E⟩ ⟨200D⟩          <202E>
emoji parts               ⟨1F3FD⟩, flags ⟨1F1E9⟩ <1F3FD>
variation selectors       nothing                nothing
a mark without a letter   ◌́                      <0301>
a space (in a token)      ·                      _
========================  =====================  ============
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

from rich.cells import cell_len

LEFT_TO_RIGHT_MARK = "\u200e"  # no width; keeps what stands beside right-to-left text in its place
MARKS_PER_LETTER = 2           # stacked further, marks run over the lines above and below
ASCII_CONTROLS = (
    "NUL", "SOH", "STX", "ETX", "EOT", "ENQ", "ACK", "BEL", "BS", "TAB", "LF", "VT", "FF", "CR", "SO", "SI", "DLE",
    "DC1", "DC2", "DC3", "DC4", "NAK", "SYN", "ETB", "CAN", "EM", "SUB", "ESC", "FS", "GS", "RS", "US",
)


def safe(text: str, *, width: int | None = None, ascii: bool = False, token: bool = False) -> str:
    """One line, at most ``width`` cells wide, that cannot disturb what stands around it.

    ``safe("a\\x1b[2J\\n")`` is ``a␛[2J⏎``; with ``token`` its spaces are visible too.
    """
    kept = list(_symbols(text, ascii, token, limit=width))
    if width is not None and sum(map(cell_len, kept)) > width:
        ellipsis = "~" if ascii else "…"
        room = width - 1
        used, cut = 0, 0
        while cut < len(kept) and used + cell_len(kept[cut]) <= room:
            used += cell_len(kept[cut])
            cut += 1
        kept = [*kept[:cut], ellipsis] if width > 0 else []
    return _keep_order("".join(kept))


def safe_lines(text: str, width: int, *, ascii: bool = False) -> list[str]:
    """The text as lines of at most ``width`` cells, broken at spaces where there are any."""
    lines: list[str] = []
    line: list[str] = []
    used = last_space = 0
    for symbol in _symbols(text, ascii, token=False):
        size = cell_len(symbol)
        while used + size > max(width, 2) and line:
            at = last_space if last_space else len(line)
            lines.append("".join(line[:at]))
            line = line[at:]
            used, last_space = sum(map(cell_len, line)), 0
        line.append(symbol)
        used += size
        if symbol == " ":
            last_space = len(line)
    return [_keep_order(piece.rstrip(" ")) for piece in [*lines, "".join(line)]] if line or lines else []


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Spaces up to ``width`` cells, after the text or (``right``) before it."""
    fill = " " * max(0, width - cell_len(text))
    return fill + text if right else text + fill


def _symbols(text: str, ascii: bool, token: bool, limit: int | None = None) -> Iterator[str]:
    """One visible symbol per character, a letter together with its marks; stops well past ``limit`` cells."""
    pending = ""  # a letter that may still get marks
    marks = used = 0
    for char in text:
        category = unicodedata.category(char)
        if "\ufe00" <= char <= "\ufe0f" or "\U000e0100" <= char <= "\U000e01ef":
            continue
        if category[0] == "M" and not ascii and cell_len(char) == 0:
            marks += 1
            if marks <= MARKS_PER_LETTER:
                pending = (pending or "◌") + char
            continue
        if pending:
            yield pending
            pending, marks = "", 0
        symbol = _symbol(char, category, ascii, token)
        used += cell_len(symbol)
        if category[0] in "LNSP" and symbol == char:
            pending = char
        else:
            yield symbol
        if limit is not None and used > limit:
            break
    if pending:
        yield pending


def _symbol(char: str, category: str, ascii: bool, token: bool) -> str:
    if char == " ":
        return ("_" if ascii else "·") if token else " "
    code = ord(char)
    if code < 0x20 or code == 0x7F:
        if ascii:
            return f"<{'DEL' if code == 0x7F else ASCII_CONTROLS[code]}>"
        return {"\n": "⏎", "\t": "⇥", "\x7f": "␡"}.get(char, chr(0x2400 + code))
    if ascii:
        return char if code < 0x7F else f"<{code:04X}>"
    is_emoji_part = 0x1F1E6 <= code <= 0x1F1FF or 0x1F3FB <= code <= 0x1F3FF
    if category[0] in "CZ" or is_emoji_part or not 1 <= cell_len(char) <= 2:
        return f"⟨{code:04X}⟩"
    return char


def _keep_order(line: str) -> str:
    """Between two of these marks right-to-left text cannot swap places with its neighbours."""
    if any(unicodedata.bidirectional(char) in ("R", "AL", "AN") for char in line):
        return LEFT_TO_RIGHT_MARK + line + LEFT_TO_RIGHT_MARK
    return line
