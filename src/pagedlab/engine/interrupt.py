"""Ctrl-C between steps, not inside one."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Interrupts:
    """``with`` it, Ctrl-C is only remembered, and raised by ``raise_if_came`` or at the end of the block.

    A step that is cut off in the middle leaves blocks marked as cached that were never written. A
    second Ctrl-C does not wait. Only the main thread gets the signal, and a program with a handler
    of its own keeps it. Blocks may be nested, so that a loop over steps changes the handler once.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._is_installed = False
        self._came = False

    def __enter__(self) -> None:
        self._depth += 1
        if (
            self._depth == 1
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            signal.signal(signal.SIGINT, self._remember)
            self._is_installed = True

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._is_installed = False
            if kind is None:
                self.raise_if_came()
            self._came = False

    def raise_if_came(self) -> None:
        """To be called where stopping does no harm."""
        if self._came:
            self._came = False
            raise KeyboardInterrupt

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        if self._came:
            raise KeyboardInterrupt
        self._came = True
