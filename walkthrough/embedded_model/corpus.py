"""The corpus: Jane Austen's six novels, cut into chapters, one in twenty held out.

``corpus.txt.xz`` holds 269 chapters in the order of publication, separated by form
feeds, one paragraph per line, paragraphs separated by an empty line
(``LICENSE.corpus.md`` says where it comes from and what was tidied).
"""

import lzma
import re
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus.txt.xz")
HELD_OUT_EVERY = 20
HELD_OUT_OFFSET = 10


def read_chapters() -> tuple[list[str], list[str]]:
    """Return (training chapters, held-out chapters).

    Held out are chapters 10, 30, 50, ... (counting from 0 across all novels): whole
    chapters, so that no sentence of theirs is seen in training, and some of each novel,
    so that one novel's style does not decide the number.
    """
    chapters = lzma.decompress(CORPUS.read_bytes()).decode("utf-8").split("\f")
    held_out = [c for i, c in enumerate(chapters) if i % HELD_OUT_EVERY == HELD_OUT_OFFSET]
    training = [c for i, c in enumerate(chapters) if i % HELD_OUT_EVERY != HELD_OUT_OFFSET]
    return training, held_out


def words(text: str) -> list[str]:
    """Lower-case words of ``text``: letters, with inner apostrophes (``don't``)."""
    return re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)*", text.lower())
