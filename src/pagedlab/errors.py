"""The two ways to tell a user that something is not as it should be."""

from __future__ import annotations

import sys

from pagedlab.wording import printable


class UserError(ValueError):
    """Bad input: the message is one sentence that says what is wrong and what to do.

    The command line prints it after ``pagedlab: `` and exits with status 2; a program sees a
    ``ValueError``. Nothing is half-written or half-changed when it is raised.
    """


def notice(text: str) -> None:
    """One line on stderr about what is odd but bearable; the work goes on."""
    print(f"pagedlab: notice: {printable(text, most=2_000)}", file=sys.stderr)
