"""Features of the encoder that was trained on pictures of random processes."""

from __future__ import annotations

import hashlib
from importlib.resources import files

import pytest
import torch
from torch import Tensor

from fedcdp.errors import ModelError
from fedcdp.models import random_process
from fedcdp.models.random_process import RandomProcess, packed_weights


def images(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1))


def test_features_have_norm_one_and_belong_to_one_image_alone() -> None:
    features = RandomProcess()
    batch = images(3, 3, 32, 32)
    found = features(batch)
    assert found.shape == (3, 2304)
    assert torch.allclose(found.norm(dim=1), torch.ones(3), atol=1e-5)
    assert torch.allclose(found, torch.cat([features(each[None]) for each in batch]), atol=1e-5)


def test_an_image_and_its_mirror_image_have_the_same_features() -> None:
    features, batch = RandomProcess(), images(2, 3, 32, 32)
    assert torch.allclose(features(batch), features(batch.flip(3)), atol=1e-5)
    assert not torch.allclose(features(batch), features(batch.flip(2)), atol=1e-2)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 64, 48), (1, 32, 32)])
def test_other_sizes_and_grey_images_are_accepted(shape: tuple[int, int, int]) -> None:
    assert RandomProcess(shape)(images(1, *shape)).shape == (1, 2304)


def test_other_channels_are_refused() -> None:
    with pytest.raises(ModelError, match="1 or 3 channels, not 4"):
        RandomProcess((4, 32, 32))


def test_the_weights_are_those_of_the_release_and_none_is_trained() -> None:
    features = RandomProcess()
    assert not list(features.parameters())
    assert all(value.dtype == torch.float16 and value.isfinite().all() for value in packed_weights().values())
    content = (files("fedcdp.models") / "random_process.safetensors").read_bytes()
    assert len(content) < 13 * 2**20
    assert hashlib.sha256(content).hexdigest() == random_process.DIGEST


def test_damaged_weights_are_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    packed_weights.cache_clear()
    monkeypatch.setattr(random_process, "DIGEST", "0" * 64)
    with pytest.raises(ModelError, match="is damaged; install fedcdp again"):
        RandomProcess()
    packed_weights.cache_clear()


def test_features_of_fixed_pixels_stay_the_same() -> None:
    """A change of the code must not change the features: trained heads depend on them."""
    ramp = torch.linspace(0, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
    assert torch.allclose(RandomProcess()(ramp)[0, :4], torch.tensor(FIRST), atol=1e-4)


FIRST = [0.00095, 0.00189, 0.00013, 0.00207]
