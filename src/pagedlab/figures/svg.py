"""A drawing of boxes, cells, arrows and words, as SVG at slide size."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from pagedlab.viz.text import safe

WIDTH, HEIGHT = 1280, 720
THEMES = {
    "light": {
        "paper": "#ffffff", "ink": "#1b1f24", "dim": "#5b6470", "line": "#c3c9d2", "wash": "#f3f5f8",
        "accent": "#c2410c", "hit": "#b9c2cf",
        "r0": "#0072b2", "r1": "#b86e00", "r2": "#00795a", "r3": "#a8437f",
    },
    "dark": {
        "paper": "#14171c", "ink": "#e8eaee", "dim": "#9aa3b0", "line": "#3f4855", "wash": "#1e232b",
        "accent": "#fb923c", "hit": "#4b5768",
        "r0": "#56b4e9", "r1": "#f0b429", "r2": "#34c38f", "r3": "#e08bc0",
    },
}  # fmt: skip
SANS = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, 'DejaVu Sans Mono', Menlo, monospace"


class Drawing:
    """Collects shapes; colours are names of a theme until it is rendered."""

    def __init__(self, title: str, about: str) -> None:
        self.title, self.about = title, about
        self._shapes: list[str] = []
        self.text(40, 56, title, size=28, weight=700)
        self.paragraph(40, 86, about, 1200, size=17, fill="dim")

    def text(
        self,
        x: float,
        y: float,
        words: object,
        *,
        size: float = 16,
        weight: int = 400,
        fill: str = "ink",
        anchor: str = "start",
        mono: bool = False,
    ) -> None:
        """One line; ``y`` is its baseline. A stranger's text is made visible, never markup."""
        family = MONO if mono else SANS
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-family="{family}" font-size="{size:g}" font-weight="{weight}" '
            f'text-anchor="{anchor}" fill="${fill}$" xml:space="preserve">{escape(safe(str(words)))}</text>'
        )

    def paragraph(self, x: float, y: float, words: str, width: float, *, size: float = 15, fill: str = "ink") -> float:
        """Words wrapped at about ``width``; returns the baseline below the last line."""
        most = max(8, int(width / (size * 0.53)))
        line = ""
        for word in words.split():
            if line and len(line) + 1 + len(word) > most:
                self.text(x, y, line, size=size, fill=fill)
                line, y = word, y + size * 1.35
            else:
                line = f"{line} {word}".strip()
        self.text(x, y, line, size=size, fill=fill)
        return y + size * 1.35

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        *,
        fill: str = "wash",
        stroke: str = "line",
        dashed: bool = False,
        radius: float = 8,
        thick: float = 1.5,
    ) -> None:
        dash = ' stroke-dasharray="6 5"' if dashed else ""
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius:g}" fill="${fill}$" '
            f'stroke="${stroke}$" stroke-width="{thick:g}"{dash}/>'
        )

    def card(self, x: float, y: float, w: float, h: float, head: str, lines: Sequence[str], **style: str) -> None:
        """A box with a heading, the code it stands for or what it says below."""
        self.box(x, y, w, h, **style)  # type: ignore[arg-type]
        self.text(x + 14, y + 27, head, size=17, weight=650)
        at = y + 52.0
        for line in lines:
            at = self.paragraph(x + 14, at, line, w - 28, size=14, fill="dim")

    def cell(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        label: object,
        *,
        fill: str = "paper",
        stroke: str = "line",
        ink: str = "ink",
        size: float = 15,
        thick: float = 1.2,
        mono: bool = True,
    ) -> None:
        """A small box with its content in the middle."""
        self.box(x, y, w, h, fill=fill, stroke=stroke, radius=3, thick=thick)
        self.text(x + w / 2, y + h / 2 + size * 0.35, label, size=size, fill=ink, anchor="middle", mono=mono)

    def arrow(
        self, x1: float, y1: float, x2: float, y2: float, *, stroke: str = "dim", bend: float = 0, dashed: bool = False
    ) -> None:
        """A line with a head; ``bend`` pulls its middle sideways."""
        dash = ' stroke-dasharray="5 5"' if dashed else ""
        mx, my = (x1 + x2) / 2 + bend * (y2 - y1) / 100, (y1 + y2) / 2 - bend * (x2 - x1) / 100
        self._shapes.append(
            f'<path d="M {x1:g} {y1:g} Q {mx:g} {my:g} {x2:g} {y2:g}" fill="none" stroke="${stroke}$" '
            f'stroke-width="2" marker-end="url(#head-{stroke})"{dash}/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, *, stroke: str = "line", thick: float = 1.5) -> None:
        self._shapes.append(
            f'<path d="M {x1:g} {y1:g} C {(x1 + x2) / 2:g} {y1:g}, {(x1 + x2) / 2:g} {y2:g}, {x2:g} {y2:g}" '
            f'fill="none" stroke="${stroke}$" stroke-width="{thick:g}"/>'
        )

    def render(self, theme: str) -> str:
        """The whole file; the same drawing gives the same bytes."""
        colours = THEMES[theme]
        heads = "".join(
            f'<marker id="head-{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M 0 0 L 10 5 L 0 10 z" fill="${name}$"/></marker>'
            for name in colours
        )
        body = "\n".join(self._shapes)
        text = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            f'role="img">\n<title>{escape(safe(self.title))}</title>\n'
            f"<desc>{escape(safe(self.about))}</desc>\n<defs>{heads}</defs>\n"
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="$paper$"/>\n{body}\n</svg>\n'
        )
        for name, value in colours.items():
            text = text.replace(f"${name}$", value)
        return text
