from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from fedcdp.files.tree import Layout, combine, repeat
from fedcdp.models.networks import build


def test_a_layer_is_a_module_with_its_weight_and_bias_together():
    layout = Layout.of(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4, bias=False)))
    assert layout.layers == (("0.weight", "0.bias"), ("2.weight",))
    assert layout.shapes == {"0.weight": (3, 2), "0.bias": (3,), "2.weight": (4, 3)}
    assert layout.size == 6 + 3 + 12


def test_nested_modules_are_layers_of_their_own_beside_their_owners_weights():
    outer = nn.Module()
    outer.scale = nn.Parameter(torch.ones(2))
    outer.inner = nn.Linear(2, 2)
    assert Layout.of(outer).layers == (("scale",), ("inner.weight", "inner.bias"))


def test_modules_inside_one_block_are_layers_of_their_own():
    block = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.GroupNorm(1, 2)))
    assert Layout.of(nn.Sequential(block)).layers == (
        ("0.0.weight", "0.0.bias"),
        ("0.1.0.weight", "0.1.0.bias"),
        ("0.1.1.weight", "0.1.1.bias"),
    )


@pytest.mark.parametrize(
    ("network", "shape", "layers"), [("cnn", (1, 28, 28), 3), ("mlp", (30,), 3), ("cpl", (3, 16, 16), 5)]
)
def test_the_papers_networks_have_the_papers_layers(network, shape, layers):
    layout = Layout.of(build(network, shape, 10))
    assert len(layout.groups("layer")) == layers
    assert layout.groups("flat") == (tuple(layout.shapes),)


def test_frozen_weights_are_not_part_of_a_layout():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    model[1].weight.requires_grad_(False)
    assert Layout.of(model).layers == (("1.bias",), ("2.weight", "2.bias"))


def test_a_shared_weight_is_counted_once_at_its_first_owner():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    layout = Layout.of(model)
    assert layout.layers == (("0.weight", "0.bias"), ("1.bias",))
    assert layout.size == 9 + 3 + 3


def test_every_trainable_weight_is_in_exactly_one_layer(problem):
    layout = Layout.of(problem.model)
    grouped = [name for layer in layout.layers for name in layer]
    assert sorted(grouped) == sorted(layout.shapes)
    assert sorted(grouped) == sorted(name for name, p in problem.model.named_parameters() if p.requires_grad)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(
    shapes=st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=1, max_size=4),
    leading=st.lists(st.integers(1, 3), max_size=2),
)
def test_unflattening_undoes_flattening_for_any_shapes_and_leading_axes(shapes, leading):
    layout = Layout({f"w{i}": torch.Size(shape) for i, shape in enumerate(shapes)}, ())
    tree = {name: torch.randn((*leading, *shape)) for name, shape in layout.shapes.items()}
    flat = layout.flatten(tree, lead=len(leading))
    assert flat.shape == (*leading, layout.size)
    back = layout.unflatten(flat)
    assert {name: value.shape for name, value in back.items()} == {name: value.shape for name, value in tree.items()}
    assert all(torch.equal(back[name], tree[name]) for name in tree)


def test_coordinates_are_counted_in_the_layouts_order():
    layout = Layout({"b": torch.Size([2]), "a": torch.Size([1, 2])}, ())
    flat = layout.flatten({"a": torch.tensor([[3.0, 4.0]]), "b": torch.tensor([1.0, 2.0])}, lead=0)
    assert flat.tolist() == [1, 2, 3, 4]


def test_combine_adds_a_multiple_and_leaves_its_arguments():
    left, right = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([10.0, 20.0])}
    assert combine(left, right, -0.5)["w"].tolist() == [-4, -8]
    assert combine(left, right)["w"].tolist() == [11, 22]
    assert left["w"].tolist() == [1, 2]


def test_repeat_gives_every_client_the_same_weights_without_copying():
    weights = {"w": torch.randn(2, 3), "s": torch.tensor(4.0)}
    repeated = repeat(weights, 5)
    assert repeated["w"].shape == (5, 2, 3)
    assert repeated["s"].tolist() == [4] * 5
    assert all(torch.equal(each, weights["w"]) for each in repeated["w"])
    assert repeated["w"].data_ptr() == weights["w"].data_ptr()
