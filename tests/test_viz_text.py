"""A stranger's text never moves, hides, reorders or widens anything."""

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from pagedlab.viz.text import LEFT_TO_RIGHT_MARK, pad, safe, safe_lines

BIDI_CONTROLS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
HOSTILE = [
    "\x1b[2J\x1b[1;1H", "\x1b]0;title\x07", "\x9b31m", "a\rb", "a\nb\n", "\t\t", "\x00", "\x7f", "\ud800",
    "\u202eevil\u202c", "\u2066x", "שלום עולם", "مرحبا", "abc שלום", "中文字", "ｗｉｄｅ",
    "👨\u200d👩\u200d👧", "🇩🇪🇫🇷", "👍\U0001f3fd", "❤\ufe0f",
    "e" + "\u0301" * 40, "\u0301", "क्षि", "\u200b\u200b", "\ufeff", "\u1160", "\u115f", "\u00ad", "\ue000",
    "\U000e0041", "\u2028\u2029", "[bold]x[/bold]", ":smile:", "<b>&amp;</b>", "", " ", "\u3000",
]
NASTY = "ab \n\t\x1b\x9b\u202e\u2066\u200d\u0301\ufe0f\u05d0\u0627中👍\U0001f3fd\U0001f1e9\U0001f1ea\u1160\ud800"
anything = st.text(st.characters(codec=None), max_size=60) | st.text(st.sampled_from([*NASTY]), max_size=40)


def assert_harmless(line: str) -> None:
    inner = line
    if line.startswith(LEFT_TO_RIGHT_MARK):
        assert line.endswith(LEFT_TO_RIGHT_MARK)
        inner = line[1:-1]
    for char in inner:
        assert unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"), ascii(line)
        assert char not in BIDI_CONTROLS
    assert cell_len(line) == sum(cell_len(char) for char in line), "characters that merge in some terminals"
    line.encode()


@given(anything, st.none() | st.integers(0, 20), st.booleans(), st.booleans())
@example("\x1b[2J", None, False, False)
def test_any_text_becomes_one_harmless_line_no_wider_than_asked(text, width, ascii, token):
    line = safe(text, width=width, ascii=ascii, token=token)
    assert_harmless(line)
    if width is not None:
        assert cell_len(line) <= width
    if ascii:
        line.encode("ascii")


@given(anything, st.integers(1, 30), st.booleans())
def test_any_text_wraps_into_harmless_lines_no_wider_than_asked(text, width, ascii):
    for line in safe_lines(text, width, ascii=ascii):
        assert_harmless(line)
        widest_symbol = 8  # ⟨10FFFF⟩; a single symbol is never cut
        assert cell_len(line) <= max(width, widest_symbol)


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_hostile_texts_are_harmless(text):
    for width in (None, 1, 3, 8):
        assert_harmless(safe(text, width=width))
        assert_harmless(safe(text, width=width, ascii=True, token=True))


def test_what_cannot_be_seen_is_shown_as_a_symbol():
    assert safe("a\x1b[2J\n\t\x7f\x9b") == "a␛[2J⏎⇥␡⟨009B⟩"
    assert safe("\u202eabc") == "⟨202E⟩abc"
    assert safe("a b", token=True) == "a·b"
    assert safe("a b\x1b\n中", token=True, ascii=True) == "a_b<ESC><LF><4E2D>"


def test_letters_of_all_scripts_stay_themselves():
    assert safe("naïve Ωμέγα Привет 中文") == "naïve Ωμέγα Привет 中文"


def test_emoji_are_taken_apart_so_that_every_terminal_agrees_on_their_width():
    assert safe("👨\u200d👩") == "👨⟨200D⟩👩"
    assert safe("❤\ufe0f") == "❤"
    assert safe("🇩🇪") == "⟨1F1E9⟩⟨1F1EA⟩"


def test_right_to_left_text_is_fenced_so_that_its_neighbours_stay_in_place():
    fenced = safe("שלום")
    assert fenced == "\u200eשלום\u200e"
    assert cell_len(fenced) == 4
    assert "\u200e" not in safe("abc")


def test_a_cut_text_says_so_and_never_cuts_a_wide_character_in_half():
    assert safe("abcdef", width=4) == "abc…"
    assert safe("中中中", width=4) == "中…"
    assert safe("abcdef", width=4, ascii=True) == "abc~"
    assert safe("abcd", width=4) == "abcd"


def test_marks_stay_with_their_letter_and_do_not_pile_up():
    assert safe("e\u0301") == "e\u0301"
    assert safe("e" + "\u0301" * 9) == "e\u0301\u0301"
    assert safe("\u0301") == "◌\u0301"


def test_long_texts_break_at_spaces():
    assert safe_lines("It is a truth universally", 10) == ["It is a", "truth", "universall", "y"]


def test_padding_counts_cells():
    assert pad("中", 4) == "中  "
    assert pad("中", 4, right=True) == "  中"
