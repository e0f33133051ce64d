"""Boxes and arrows as SVG."""

from __future__ import annotations

from html import escape

BLUE, GREEN, YELLOW, RED, GREY, WHITE = "#dbe9ff", "#dcf3e1", "#fff3cd", "#fbdcdc", "#eceff3", "#ffffff"
_LINE = 17  # pixels between two lines of text

_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" \
role="img" aria-label="{title}" font-family="system-ui, sans-serif" font-size="13" fill="#1c2330">
<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" \
orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="#4a5568"/></marker></defs>
<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>
"""


class Drawing:
    """An SVG picture with a white background, so that it can be read on light and dark pages."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [_HEAD.format(width=width, height=height, title=escape(title, quote=True))]

    def box(self, x: int, y: int, width: int, height: int, title: str, *lines: str, fill: str = BLUE) -> None:
        """Draw a box with a bold title and lines of text below it."""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" stroke="#8a94a6"/>\n'
        )
        top = y + (height - _LINE * (len(lines) + 1)) // 2 + 13
        self.text(x + width // 2, top, title, bold=True, anchor="middle")
        for number, line in enumerate(lines, 1):
            self.text(x + width // 2, top + _LINE * number, line, anchor="middle", size=12)

    def frame(self, x: int, y: int, width: int, height: int, title: str) -> None:
        """Draw a dashed frame around boxes that belong together."""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="#f7f8fa" stroke="#b3bac6" '
            f'stroke-dasharray="5 4"/>\n'
        )
        self.text(x + 10, y + 18, title, color="#5a6475")

    def arrow(self, x1: int, y1: int, x2: int, y2: int, label: str = "", *, both: bool = False) -> None:
        """Draw an arrow, with a label beside its middle."""
        start = ' marker-start="url(#head)"' if both else ""
        self._parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#4a5568" stroke-width="1.4" '
            f'marker-end="url(#head)"{start}/>\n'
        )
        if label:
            steep = abs(y2 - y1) > abs(x2 - x1)
            x, y = (x1 + x2) // 2 + (8 if steep else 0), (y1 + y2) // 2 + (4 if steep else -6)
            self.text(x, y, label, anchor="start" if steep else "middle", size=12, color="#3b4557")

    def text(
        self,
        x: int,
        y: int,
        text: str,
        *,
        bold: bool = False,
        anchor: str = "start",
        size: int = 13,
        color: str = "#1c2330",
    ) -> None:
        """Draw one line of text."""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="{color}"{weight}>'
            f"{escape(text)}</text>\n"
        )

    def svg(self) -> str:
        """Return the picture."""
        return "".join(self._parts) + "</svg>\n"
