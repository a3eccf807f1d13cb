"""Numbers and foreign text in sentences."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """``1 usable block``, ``2,048 tokens``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def are(count: int) -> str:
    """The verb behind a number: ``1 is``, ``12 are``."""
    return f"{count:,} is" if count == 1 else f"{count:,} are"


def printable(text: str, most: int = 300) -> str:
    """Text from a file, fit for a message: no control characters, no end of line, not endless."""
    shown = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return shown if len(shown) <= most else shown[: most - 1] + "…"
