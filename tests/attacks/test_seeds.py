"""Seeds: a patch that is really repeated, uniform, and the same for a victim whoever is attacked beside it."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from scipy.stats import kstest
from torch import Tensor

from fedcdp.attacks import recipe
from fedcdp.attacks.recipe import Seed
from fedcdp.errors import PlanError

VICTIMS = torch.arange(3)


def test_the_papers_pattern_is_one_patch_of_half_the_width_four_times() -> None:
    drawn = Seed().draw(VICTIMS, 2, (3, 28, 28), seed=1)
    assert drawn.shape == (3, 2, 3, 28, 28)
    patch = drawn[..., :14, :14]
    for row in (0, 14):
        for column in (0, 14):
            assert torch.equal(drawn[..., row : row + 14, column : column + 14], patch)
    assert len(patch.unique()) > 0.99 * patch.numel()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(tiles=st.integers(1, 6), height=st.integers(1, 11), width=st.integers(1, 11), channels=st.integers(1, 3))
def test_a_pattern_repeats_every_tile_and_is_cut_where_the_size_is_odd(
    tiles: int, height: int, width: int, channels: int
) -> None:
    drawn = Seed("pattern", tiles).draw(VICTIMS, 2, (channels, height, width), seed=1)
    assert drawn.shape == (3, 2, channels, height, width)
    rows, columns = -(-height // tiles), -(-width // tiles)
    for row in range(height):
        for column in range(width):
            assert torch.equal(drawn[..., row, column], drawn[..., row % rows, column % columns])
    distinct = 6 * channels * min(rows, height) * min(columns, width)
    assert 0.99 * distinct < len(drawn.unique()) <= distinct


@pytest.mark.parametrize("size", [8, 9, 1])
def test_a_vector_is_tiled_along_its_length(size: int) -> None:
    drawn = Seed().draw(VICTIMS, 1, (size,), seed=1)
    half = -(-size // 2)
    assert drawn.shape == (3, 1, size)
    assert torch.equal(drawn[..., half:], drawn[..., : size - half])
    assert len(drawn.unique()) == 3 * half


def test_uniform_seeds_have_no_pattern() -> None:
    assert len(Seed("uniform").draw(VICTIMS, 2, (1, 28, 28), seed=1).unique()) > 0.99 * 3 * 2 * 784


@pytest.mark.parametrize(("kind", "distribution"), [("pattern", "uniform"), ("uniform", "uniform"), ("normal", "norm")])
def test_seeds_follow_their_distribution(kind: str, distribution: str) -> None:
    drawn = Seed(kind, 1).draw(torch.arange(20), 1, (1, 28, 28), seed=2).flatten()
    assert kstest(drawn.numpy(), distribution).pvalue > 1e-3
    if distribution == "uniform":
        assert float(drawn.min()) >= 0
        assert float(drawn.max()) < 1


def test_a_uniform_seed_is_below_one_whatever_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest words are nearer to 1 than a float32 can be."""
    monkeypatch.setattr(recipe, "words", lambda *at: torch.full((len(at[1]), at[-1]), 2**32 - 1))
    assert float(Seed().draw(VICTIMS, 1, (4,), seed=1).max()) < 1


def test_zeros_are_zeros() -> None:
    assert not Seed("zeros").draw(VICTIMS, 2, (1, 5, 5), seed=1).any()


@pytest.mark.parametrize("kind", ["pattern", "uniform", "normal"])
def test_a_victims_seed_does_not_depend_on_who_is_attacked_with_it(kind: str) -> None:
    everyone = Seed(kind).draw(torch.arange(9), 2, (1, 7, 7), seed=3)
    for some in ([4], [8, 0], [2, 3, 5]):
        assert torch.equal(Seed(kind).draw(torch.tensor(some), 2, (1, 7, 7), seed=3), everyone[some])


@pytest.mark.parametrize("kind", ["pattern", "uniform", "normal"])
def test_victims_examples_restarts_and_seeds_differ(kind: str) -> None:
    def drawn(seed: int, restart: int) -> Tensor:
        return Seed(kind).draw(VICTIMS, 2, (1, 6, 6), seed, restart).flatten(0, 1)

    together = torch.cat([drawn(seed, restart) for seed in (0, 1) for restart in (0, 1)]).flatten(1)
    assert len(together.unique(dim=0)) == len(together) == 24
    correlation = torch.corrcoef(together[:, :9] if kind == "pattern" else together).fill_diagonal_(0)
    assert float(correlation.abs().max()) < 0.95


def test_drawing_a_seed_leaves_torchs_own_generator_alone() -> None:
    before = torch.get_rng_state()
    Seed("normal").draw(VICTIMS, 1, (4,), seed=1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"kind": "stripes"}, "seed: 'stripes' is not one of pattern, uniform, normal, zeros, posterior"),
        ({"tiles": 0}, "tiles: 0 is not allowed; it must be at least 1"),
    ],
)
def test_a_seed_that_does_not_exist_is_refused_in_a_sentence(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(PlanError) as error:
        Seed(**fields)
    assert str(error.value) == sentence
