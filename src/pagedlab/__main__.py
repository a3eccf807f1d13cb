"""``pagedlab`` and ``python -m pagedlab``: where a process begins.

Importing the command line takes a moment, and Ctrl-C in it must end as quietly as later on.
"""

from __future__ import annotations

import signal


def run() -> None:
    """Import the command line and run it."""
    try:
        from pagedlab.cli import main

        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python takes a moment to leave; pressed then, it shows nothing


if __name__ == "__main__":
    run()
