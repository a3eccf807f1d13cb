"""Stepping with the keyboard: space, enter or n for the next step, c to run on, q to end."""

from __future__ import annotations

import os
import sys

from rich.console import Console

PROMPT = "-- space: next step   c: continue to the end   q: quit --"


class Quit(KeyboardInterrupt):
    """The reader wants no more; a KeyboardInterrupt, so that an engine at work ends as cleanly as after Ctrl-C."""


class Pause:
    """Waits for a key on stdin, a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_on = True

    @classmethod
    def on_terminal(cls, console: Console) -> Pause | None:
        """None, and a notice on stderr, where keys cannot be read or nobody would see the question."""
        try:
            import termios  # noqa: F401  # absent on Windows

            if sys.stdin.isatty() and console.file.isatty():
                return cls(console)
        except (ImportError, ValueError):
            pass
        print("pagedlab: --pause needs a terminal to read keys from; showing every step.", file=sys.stderr)
        return None

    def wait(self) -> None:
        """Return at the next key that means go on.

        Raises:
            Quit: q was pressed, or input has ended.
            KeyboardInterrupt: Ctrl-C.
        """
        if not self._is_on:
            return
        out = self._console.file
        out.write(PROMPT)
        out.flush()
        try:
            while True:
                key = _read_key(sys.stdin.fileno())
                if key == b"\x03":
                    raise KeyboardInterrupt
                if key in (b"q", b"Q", b"\x04", b""):
                    raise Quit
                if key in (b"c", b"C"):
                    self._is_on = False
                    return
                if key in (b" ", b"\r", b"\n", b"n", b"N", b"\x1b[B", b"\x1b[C"):  # also arrows down and right
                    return
        finally:
            out.write("\r" + " " * len(PROMPT) + "\r")
            out.flush()


def _read_key(fd: int) -> bytes:
    """One key, unechoed; signals off, so that Ctrl-C is read here and not swallowed by a step in progress."""
    import termios

    before = termios.tcgetattr(fd)
    raw = termios.tcgetattr(fd)
    raw[3] &= ~(termios.ICANON | termios.ECHO | termios.ISIG)
    termios.tcsetattr(fd, termios.TCSADRAIN, raw)
    try:
        return os.read(fd, 8)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
