"""Features of public benchmarks are kept between runs; those of anybody's own data are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedcdp.data.dataset import Dataset
from fedcdp.models.features import OrientedGradients
from fedcdp.training import feature_cache
from fedcdp.training.feature_cache import features_of

CPU = torch.device("cpu")


class Counting(nn.Module):
    """Oriented gradients that count how often they are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.calls = OrientedGradients(), 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.features(images)
        return found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDCDP_CACHE", str(tmp_path))
    monkeypatch.setattr(feature_cache, "WORTH_KEEPING", -1.0)
    return tmp_path


def data(benchmark: str | None, seed: int = 0) -> Dataset:
    images = torch.rand(4, 1, 16, 16, generator=torch.Generator().manual_seed(seed))
    return Dataset(images, torch.arange(4) % 2, 2, benchmark=benchmark)


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_second_run_reads_what_the_first_computed(cache: Path) -> None:
    front = Counting()
    first, second = (features_of(front, data("mnist"), CPU) for _ in range(2))
    assert front.calls == 1
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert torch.equal(first, second)
    (path,) = files_in(cache)
    assert path.stat().st_mode & 0o777 == 0o600


def test_other_images_and_other_layers_are_computed_anew() -> None:
    front = Counting()
    features_of(front, data("mnist"), CPU)
    features_of(front, data("mnist", seed=1), CPU)
    assert front.calls == 2
    front.features.directions *= 2
    features_of(front, data("mnist"), CPU)
    assert front.calls == 3


def test_features_of_own_data_are_never_written(cache: Path) -> None:
    front = Counting()
    for _ in range(2):
        features_of(front, data(None), CPU)
    assert front.calls == 2
    assert not files_in(cache)


def test_a_damaged_file_is_computed_again(cache: Path) -> None:
    front = Counting()
    features_of(front, data("mnist"), CPU)
    (path,) = files_in(cache)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))
    features_of(front, data("mnist"), CPU)
    assert front.calls == 2


def test_a_cache_that_cannot_be_written_stops_nothing(cache: Path) -> None:
    (cache / "mnist").write_text("a file in the place of the folder")
    assert features_of(Counting(), data("mnist"), CPU) is not None
