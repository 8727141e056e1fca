"""Pictures of random processes, and the training and packing of the encoder that sees nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fedcdp.models import random_process
from tools.random_process import packing, training
from tools.random_process.network import Encoder
from tools.random_process.pictures import SIDE, Draws, pictures
from tools.random_process.training import contrastive_loss
from tools.random_process.views import view


def test_a_seed_gives_the_same_pictures_and_another_seed_others() -> None:
    first, again, other = (pictures(4, Draws(seed, "cpu")) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (4, 3, SIDE, SIDE)
    assert 0 <= first.min() < first.max() <= 1


def test_views_are_small_pictures_that_differ() -> None:
    draws = Draws(0, "cpu")
    drawn = torch.rand(6, 3, SIDE, SIDE)
    one, other = view(drawn, draws), view(drawn, draws)
    assert one.shape == (6, 3, 32, 32)
    assert not torch.equal(one, other)
    assert 0 <= one.min() < one.max() <= 1


def test_the_loss_is_small_where_the_views_of_a_picture_agree() -> None:
    vectors = torch.eye(8)
    assert contrastive_loss(vectors, vectors) < 0.1 < contrastive_loss(vectors, vectors.roll(1, 0))


def test_a_folded_convolution_computes_what_the_two_layers_did() -> None:
    encoder = Encoder(8).eval()
    for layer in encoder.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            for value in (layer.running_mean, layer.running_var, layer.weight.data, layer.bias.data):
                assert value is not None
                value.uniform_(0.5, 1.5)
    images = torch.rand(2, 3, 32, 32)
    folded = packing.folded(encoder.state_dict())
    mine = torch.nn.functional.conv2d(4 * images - 2, folded["stem_weight"], folded["stem_bias"], padding=1)
    with torch.no_grad():
        assert torch.allclose(mine, encoder.stem_norm(encoder.stem(4 * images - 2)), atol=1e-4)


@pytest.mark.slow
def test_training_and_packing_run_from_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SETTLING", 2)
    training.train(tmp_path, steps=3, width=8, seed=0, device="cpu", batch=32, pool=64)
    told = json.loads((tmp_path / "training.json").read_text())
    assert [each["step"] for each in told["log"]] == [0, 2]
    module = tmp_path / "random_process.py"
    module.write_text('DIGEST = "none"\n')
    monkeypatch.setattr(packing, "PACKAGE", module)
    packing.pack(tmp_path, seed=1, count=256, device="cpu")
    from safetensors.torch import load_file

    packed = load_file(module.with_suffix(".safetensors"))
    assert packed.keys() == random_process.packed_weights().keys()
    assert module.read_text() != 'DIGEST = "none"\n'
