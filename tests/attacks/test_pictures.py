from __future__ import annotations

import hashlib
import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from PIL import Image

from fedcdp.attacks.pictures import grid, save
from fedcdp.errors import PlanError

WHITE = (255, 255, 255)
EDGE = (200, 200, 200)


def pixels(page: Image.Image) -> np.ndarray:
    return np.asarray(page).astype(int)


def holds(page: Image.Image, part: np.ndarray) -> bool:
    """Whether the page shows the picture somewhere within a thin edge, pixel for pixel."""
    values, (height, width, _) = pixels(page), part.shape
    corners = np.argwhere((values == EDGE).all(-1)) + 1
    return any(np.array_equal(values[y : y + height, x : x + width], part) for y, x in corners)


def large(image: torch.Tensor, factor: int) -> np.ndarray:
    return np.kron((image * 255).round().int().numpy(), np.ones((factor, factor), dtype=int))


def test_a_digit_is_enlarged_by_a_whole_factor_pixel_for_pixel():
    digit = torch.rand(1, 28, 28)
    shown = np.stack([large(digit[0], 3)] * 3, -1)
    assert shown.shape == (84, 84, 3)
    assert holds(grid([[digit]], [], []), shown)
    assert holds(grid([[digit[0]]], ["truth"], ["victim"], caption="a caption"), shown)


def test_colours_are_kept():
    image = torch.zeros(3, 32, 32)
    image[0], image[1] = 1.0, 0.4
    assert (255, 102, 0) in {tuple(pixel) for row in pixels(grid([[image]], [], [])) for pixel in row}


def test_values_are_clamped_and_what_is_not_finite_is_shown_as_it_is_scored():
    image = torch.tensor([[-7.0, 7.0, math.nan, math.inf, -math.inf, 0.2]])
    assert grid([[image]], [], []) == grid([[torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, 0.2]])]], [], [])


def test_a_missing_cell_is_left_blank_and_a_short_row_too():
    image = torch.zeros(28, 28)
    full, holed, short = (
        grid(rows, [], []) for rows in ([[image] * 2] * 2, [[image] * 2, [image, None]], [[image] * 2, [image]])
    )
    assert holed == short
    assert full.size == holed.size
    changed = (pixels(full) != pixels(holed)).any(-1)
    assert (pixels(holed)[changed] == WHITE).all()
    assert changed.sum() == 86 * 86  # the picture and its thin edge, nothing else


@settings(deadline=None, derandomize=True, max_examples=30)
@given(
    columns=st.lists(st.text("abc dé-σ×W", max_size=60), min_size=2, max_size=2),
    rows=st.lists(st.text("abc dé-σ×W", max_size=60), min_size=2, max_size=2),
    caption=st.text("abc d W", max_size=200),
)
def test_titles_of_any_length_stay_on_the_page_and_off_the_pictures(columns, rows, caption):
    image = torch.full((28, 28), 0.2)
    page = grid([[image] * 2] * 2, columns, rows, caption)
    values = pixels(page)
    border = np.concatenate([values[:8].reshape(-1, 3), values[-8:].reshape(-1, 3), values[:, :8].reshape(-1, 3)])
    assert (border == WHITE).all()
    assert (values[:, -8:] == WHITE).all()
    assert (values == (51, 51, 51)).all(-1).sum() >= 4 * 84 * 84  # no title lies over a picture


def test_titles_are_drawn_and_take_no_room_when_there_are_none():
    image = torch.zeros(28, 28)
    bare, titled = grid([[image]], [], []), grid([[image]], ["truth"], ["victim 1"])
    assert bare.width < titled.width
    assert bare.height < titled.height
    assert titled != grid([[image]], ["truth"], ["victim 2"])


@pytest.mark.parametrize(("sign", "spelt"), [("σ", "sigma"), ("1e−3", "1e-3"), ("≤ ×", "<= x"), ("é²", "e2"), ("語", "?")])
def test_a_sign_that_the_font_lacks_is_spelt(sign, spelt):
    image = torch.zeros(28, 28)
    assert grid([[image]], [sign], []) == grid([[image]], [spelt], [])


def test_the_same_pictures_give_the_same_file_without_metadata(tmp_path):
    for name in ("a.png", "b.png"):
        save(grid([[torch.linspace(0, 1, 784).view(28, 28)]], ["truth"], ["one"]), tmp_path / name)
    digests = {hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("a.png", "b.png")}
    assert len(digests) == 1
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.format == "PNG"
        assert picture.info == {}


@pytest.mark.parametrize(
    ("rows", "columns", "titles", "sentence"),
    [
        ([[torch.zeros(2, 2)]], ["a", "b"], [], "column_titles: 2 titles for 1 columns"),
        ([[torch.zeros(2, 2)]], [], ["a", "b"], "row_titles: 2 titles for 1 rows"),
        ([], [], [], "rows: there is no picture to show"),
        ([[torch.zeros(4)]], [], [], r"rows: an image of shape \[4\] is not \[H, W\], "),
        ([[torch.zeros(2, 4, 4)]], [], [], r"rows: an image of shape \[2, 4, 4\] is not \[H, W\], "),
    ],
)
def test_what_cannot_be_shown_is_refused_in_a_sentence(rows, columns, titles, sentence):
    with pytest.raises(PlanError, match=sentence):
        grid(rows, columns, titles)
