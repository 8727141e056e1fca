"""Gradients in either form: the same sums and norms, and nothing of an example that is not usable."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedcdp.engine.gradients import Formed, Products


def shape(values: Tensor) -> Tensor:
    return values.flatten(-3, -2).mT


def products(groups: int, examples: int, places: int) -> Products:
    generator = torch.Generator().manual_seed(places)
    left = torch.randn(2, groups, examples, places, 4, generator=generator)
    return Products("w", left, torch.randn(2, groups, examples, places, 3, generator=generator), shape)


@settings(max_examples=30, deadline=None)
@given(groups=st.integers(1, 3), examples=st.integers(1, 4), places=st.integers(1, 5))
def test_both_forms_say_the_same(groups, examples, places):
    factored = products(groups, examples, places)
    gradients = torch.einsum("kgbpi,kgbpo->kbgio", factored.left, factored.right)
    held = Formed("w", gradients, shape)
    factors, usable = torch.rand(2, examples), torch.rand(2, examples) < 0.7
    scaled = shape(gradients * factors.where(usable, 0.0)[..., None, None, None])
    for form in (factored, held, factored.ready_to_clip()):
        torch.testing.assert_close(form.formed(), shape(gradients))
        torch.testing.assert_close(form.squared_norms(), gradients.flatten(2).square().sum(-1))
        torch.testing.assert_close(form.summed(), shape(gradients).sum(1))
        torch.testing.assert_close(form.weighted_sum(factors, usable), scaled.sum(1))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("places", [1, 3])
@pytest.mark.parametrize("part", ["left", "right"])
def test_a_bad_example_has_no_finite_norm_and_leaves_no_trace_in_a_sum(bad, places, part):
    good = products(1, 3, places)
    spoilt = products(1, 3, places)
    getattr(spoilt, part)[0, 0, 1, 0, 0] = bad
    form = spoilt.ready_to_clip()
    norms = form.squared_norms()
    assert not torch.isfinite(norms[0, 1])
    usable = torch.isfinite(norms)
    assert usable.sum() == 5
    factors = torch.rand(2, 3)
    torch.testing.assert_close(form.weighted_sum(factors, usable), good.weighted_sum(factors, usable))


def test_where_terms_cancel_the_norm_is_that_of_what_is_summed():
    """Two places whose products nearly cancel: their Gram matrix would give a norm of zero, or the root of a negative."""
    left = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]).mul(1e4)[None, None, None]
    right = torch.tensor([[1.0, 1.0], [-1.0, -1.0 + 2.0**-20]])[None, None, None]
    form = Products("w", left, right, shape).ready_to_clip()
    alone = form.weighted_sum(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool))
    assert float(alone.norm()) > 0.01
    assert float(form.squared_norms().sqrt()) == pytest.approx(float(alone.double().norm()), rel=1e-6)
