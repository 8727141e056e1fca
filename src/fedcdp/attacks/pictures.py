"""Grids of pictures: the originals next to their reconstructions.

The same pictures and titles give a byte-identical file with the same Pillow version: Pillow's own font is used, and a PNG
holds neither time nor metadata. That font has little beyond ASCII, so other characters are spelt out (σ: sigma).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from fedcdp.attacks.scores import cleaned
from fedcdp.errors import PlanError
from fedcdp.files.disk import atomic_write

_CELL = 96  # approximate size in pixels: a picture is enlarged by an integer factor
_GAP, _MARGIN, _PADDING = 8, 20, 12  # between pictures, around the page, between pictures and titles
_ROW_TITLE, _CAPTION = 160, 320  # maximum width of a row title, and minimum width of a page with a caption
_SIZE, _LINE = 14, 18
_INK, _FAINT, _EDGE, _PAGE = "#1a1a1a", "#5c5c5c", "#c8c8c8", "#ffffff"
_SPELT = {"×": "x", "–": "-", "—": "-", "−": "-", "≤": "<=", "≥": ">=", "→": "->", "√": "sqrt", "∞": "inf", "ß": "ss"}
_DRAWN = "·±…“”‘’"  # the non-ASCII characters of titles that the font has

_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def grid(
    rows: Sequence[Sequence[Tensor | None]],
    column_titles: Sequence[str],
    row_titles: Sequence[str],
    caption: str = "",
) -> Image.Image:
    """A white page of pictures [C, H, W] or [H, W] in rows under their titles; C is 1 or 3, values are clamped to [0, 1].

    If a row is short or holds None, that cell stays blank. Long titles are wrapped; nothing is ever clipped. An empty list
    of titles takes no space.
    """
    columns = max(map(len, rows), default=0)
    for name, titles, wanted in (("column_titles", column_titles, columns), ("row_titles", row_titles, len(rows))):
        if titles and len(titles) != wanted:
            raise PlanError(f"{name}: {len(titles)} titles for {wanted} {name.removesuffix('_titles')}s")
    if not columns:
        raise PlanError("rows: there is no picture to show")
    pictures = [[None if image is None else _picture(image) for image in row] for row in rows]
    return _Page(pictures, columns, column_titles, row_titles, caption).drawn()


def save(picture: Image.Image, path: Path) -> None:
    """Write a picture as a PNG file, atomically."""
    with atomic_write(path) as file:
        picture.save(file, format="PNG", optimize=True)


def _picture(image: Tensor) -> Image.Image:
    """One image in colour, enlarged by the integer factor that brings it nearest to the cell size."""
    channels = image[None] if image.dim() == 2 else image
    if channels.dim() != 3 or channels.shape[0] not in (1, 3) or not channels.numel():
        raise PlanError(f"rows: an image of shape {list(image.shape)} is not [H, W], [1, H, W] or [3, H, W]")
    bright = cleaned(channels.detach().float().cpu(), 0.0, 1.0).mul(255).round().to(torch.uint8)
    factor = max(1, round(_CELL / max(channels.shape[1:])))
    large = bright.expand(3, -1, -1).repeat_interleave(factor, 1).repeat_interleave(factor, 2)
    return Image.fromarray(large.permute(1, 2, 0).contiguous().numpy())


class _Page:
    """Layout of the page: row titles, then the columns of pictures below their titles, then the caption."""

    def __init__(
        self,
        pictures: list[list[Image.Image | None]],
        columns: int,
        column_titles: Sequence[str],
        row_titles: Sequence[str],
        caption: str,
    ) -> None:
        self.font: _Font = ImageFont.load_default(size=_SIZE)
        self.pictures = pictures
        shown = [picture for row in pictures for picture in row if picture]
        self.height = max((picture.height for picture in shown), default=_CELL)
        # Wide enough for the longest word of a title, up to a limit, so words are not broken.
        words = [self.font.getlength(word) for title in column_titles for word in _plain(title).split()]
        wide = max((picture.width for picture in shown), default=_CELL)
        self.width = max(wide, min(round(max(words, default=0)) + 1, 2 * _CELL))

        self.above = [self._wrapped(title, self.width) for title in column_titles]
        self.beside = [self._wrapped(title, _ROW_TITLE) for title in row_titles]
        self.step = max([self.height, *(_LINE * len(lines) for lines in self.beside)]) + _GAP
        beside = max((self.font.getlength(line) for lines in self.beside for line in lines), default=-_PADDING)
        self.left = _MARGIN + round(beside) + _PADDING
        self.top = _MARGIN + (_LINE * max(map(len, self.above)) + _PADDING // 2 if self.above else 0)
        right = self.left + columns * (self.width + _GAP) - _GAP + _MARGIN
        self.right = max(right, _CAPTION) if caption else right
        self.below = self._wrapped(caption, self.right - 2 * _MARGIN)
        self.bottom = self.top + len(pictures) * self.step - _GAP + _MARGIN
        if caption:
            self.bottom += _PADDING + _LINE * len(self.below)

    def drawn(self) -> Image.Image:
        """The rendered page."""
        page = Image.new("RGB", (self.right, self.bottom), _PAGE)
        draw = ImageDraw.Draw(page)
        for column, lines in enumerate(self.above):
            centre = self.left + column * (self.width + _GAP) + self.width / 2
            self._write(draw, lines, centre, self.top - _PADDING // 2 - _LINE * len(lines), "ma", _INK)
        for row, lines in enumerate(self.beside):
            centre = self.top + row * self.step + (self.step - _GAP) / 2
            self._write(draw, lines, self.left - _PADDING, centre - _LINE * len(lines) / 2, "ra", _INK)
        for picture, x, y in self._places():
            page.paste(picture, (x, y))
            draw.rectangle((x - 1, y - 1, x + picture.width, y + picture.height), outline=_EDGE)
        self._write(draw, self.below, _MARGIN, self.bottom - _MARGIN - _LINE * len(self.below), "la", _FAINT)
        return page

    def _places(self) -> Iterator[tuple[Image.Image, int, int]]:
        """Every picture and its upper left corner, centred in its cell."""
        for row, pictures in enumerate(self.pictures):
            for column, picture in enumerate(pictures):
                if picture:
                    x = self.left + column * (self.width + _GAP) + (self.width - picture.width) // 2
                    yield picture, x, self.top + row * self.step + (self.step - _GAP - picture.height) // 2

    def _write(self, draw: ImageDraw.ImageDraw, lines: list[str], x: float, y: float, anchor: str, colour: str) -> None:
        for number, line in enumerate(lines):
            draw.text((round(x), round(y) + number * _LINE), line, fill=colour, font=self.font, anchor=anchor)

    def _wrapped(self, text: str, width: int) -> list[str]:
        """The text in lines no wider than `width`, broken between words, and within a word only if necessary."""
        lines = [""]
        for word in _plain(text).split():
            joined = f"{lines[-1]} {word}".strip()
            if self.font.getlength(joined) <= width:
                lines[-1] = joined
                continue
            lines.append("")
            for letter in word:
                if self.font.getlength(lines[-1] + letter) > width:
                    lines.append("")
                lines[-1] += letter
        return [line for line in lines if line]


def _plain(text: str) -> str:
    """The text in characters that the font has."""
    return "".join(sign if sign.isascii() or sign in _DRAWN else _spelt(sign) for sign in text)


def _spelt(sign: str) -> str:
    name = unicodedata.name(sign, "")
    if name.startswith("GREEK ") and " LETTER " in name:
        return name.partition(" LETTER ")[2].split()[0].lower()
    # An accent is dropped; a character without an ASCII form becomes a question mark.
    return _SPELT.get(sign) or unicodedata.normalize("NFKD", sign).encode("ascii", "ignore").decode() or "?"
