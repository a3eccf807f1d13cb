"""``python -m pagedlab``."""

from pagedlab.cli import main

main()
