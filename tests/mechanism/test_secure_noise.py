"""Noise from the operating system: of the right distribution, never the same twice, and kept nowhere.

Statistical bounds are six standard errors: these draws cannot be repeated from a seed, so a test may fail by chance, once
in 10^8 runs.
"""

from __future__ import annotations

import math
import random
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from fedcdp.config.plan import Plan
from fedcdp.data.partition import Federation, partition
from fedcdp.errors import PlanError
from fedcdp.files.tree import Layout
from fedcdp.mechanism import noise as noise_module
from fedcdp.mechanism.noise import Noise, SecureNoise, SeededNoise, noise_of, noised
from fedcdp.mechanism.randomness import box_muller, normals, philox, words
from fedcdp.models.networks import build
from fedcdp.training.simulate import simulate

MODEL = build("mlp", (150,), 50)
LAYOUT = Layout.of(MODEL)
METHODS: list[dict[str, Any]] = [
    {"method": "fed-cdp", "noise": "example"},
    {"method": "fed-cdp", "noise": "batch"},
    {"method": "fed-cdp", "noise": "cohort"},
    {"method": "fed-cdp-decay"},
    {"method": "fed-sdp", "noise_at": "server"},
    {"method": "fed-sdp", "noise_at": "client"},
    {"method": "fed-cdp", "clip": "quantile(0.5, 1)"},
    {"method": "fed-sdp", "noise_at": "server", "clip": "quantile(0.5, 1)"},
    {"method": "fed-sdp", "noise_at": "client", "clip": "quantile(0.5, 1)"},
]


@pytest.fixture(params=["philox", "chacha20"])
def generator(request: pytest.FixtureRequest) -> str:
    if request.param == "chacha20":
        pytest.importorskip("cryptography")
    return str(request.param)


@pytest.fixture
def secure(generator: str) -> Noise:
    return SecureNoise(LAYOUT, generator)  # type: ignore[arg-type]


CLIENTS = torch.tensor([5, 6])
DRAWS: dict[str, Callable[[Noise], Tensor]] = {
    "a step": lambda noise: LAYOUT.flatten(noise.for_step(0, CLIENTS, 0, 1.0), 1),
    "examples": lambda noise: LAYOUT.flatten(noise.for_examples(0, CLIENTS, 0, 2, 1.0), 2),
    "an update": lambda noise: LAYOUT.flatten(noise.for_update(0, CLIENTS, 1.0), 1),
    "the server": lambda noise: LAYOUT.flatten(noise.for_server(0, torch.device("cpu"), 1.0), 0),
    "a count": lambda noise: noise.for_count(0, torch.arange(5000), 1.0),
    "indicators": lambda noise: noise.for_indicators(0, torch.arange(500), 9, 1.0),
    "the server's count": lambda noise: torch.tensor(
        [noise.for_server_count(0, torch.device("cpu"), 1.0) for _ in range(400)]
    ),
}


def assert_uncorrelated(left: np.ndarray, right: np.ndarray) -> None:
    assert abs(np.corrcoef(left, right)[0, 1]) < 6 / math.sqrt(left.size)
    assert abs(np.corrcoef(left**2, right**2)[0, 1]) < 6 / math.sqrt(left.size)


@pytest.mark.parametrize("draw", DRAWS)
def test_every_draw_is_standard_normal(secure, draw):
    values = DRAWS[draw](secure).flatten().double().numpy()
    assert abs(values.mean()) < 6 / math.sqrt(values.size)
    assert abs(values.std() - 1) < 6 / math.sqrt(2 * values.size)
    assert abs(stats.kurtosis(values)) < 8 * math.sqrt(24 / values.size)
    assert stats.kstest(values, "norm").pvalue > 1e-8


@pytest.mark.parametrize("draw", DRAWS)
def test_shapes_and_scale_are_those_of_seeded_noise_in_full_precision(secure, draw):
    found, expected = DRAWS[draw](secure), DRAWS[draw](SeededNoise(0, LAYOUT))
    assert found.shape == expected.shape
    assert found.dtype == torch.float64 or draw == "the server's count"  # numbers of Python, as 64 bits
    scaled = secure.for_step(0, CLIENTS, 0, 3.0)["1.weight"].double().numpy()
    assert abs(scaled.std() - 3) < 6 * 3 / math.sqrt(2 * scaled.size)


@pytest.mark.parametrize("draw", DRAWS)
def test_the_same_question_never_gets_the_same_answer(secure, draw):
    one, other = (DRAWS[draw](secure).flatten().double().numpy() for _ in range(2))
    assert (one != other).mean() > 0.999
    assert_uncorrelated(one, other)


def test_clients_slots_and_coordinates_are_independent(secure):
    examples = LAYOUT.flatten(secure.for_examples(0, CLIENTS, 0, 2, 1.0), 2).double().numpy()
    rows = examples.reshape(4, -1)
    for left in range(4):
        for right in range(left):
            assert_uncorrelated(rows[left], rows[right])
    for lag in (1, 2, 3, 4, 8):
        assert_uncorrelated(rows[0][:-lag], rows[0][lag:])


def test_every_draw_takes_fresh_entropy_from_the_operating_system(secure, monkeypatch):
    keys: list[bytes] = []
    monkeypatch.setattr(noise_module.os, "urandom", lambda size: keys.append(random.randbytes(size)) or keys[-1])
    for times, draw in ((1, "a step"), (2, "examples"), (1, "an update"), (1, "the server"), (1, "a count")):
        before = len(keys)
        DRAWS[draw](secure)
        assert len(keys) - before == 4 * times
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == ({16} if secure.generator == "philox" else {32})


def test_a_value_is_half_the_sum_of_four_made_in_double_precision(monkeypatch):
    keys = [random.Random(each).randbytes(16) for each in range(4)]
    left = list(keys)
    monkeypatch.setattr(noise_module.os, "urandom", lambda _: left.pop(0))
    drawn = SecureNoise(LAYOUT).for_indicators(0, torch.arange(3), 8, 1.0)
    expected = torch.zeros(3, 8, dtype=torch.float64)
    for key in keys:
        number, first, second = (int.from_bytes(key[a:b], "little") for a, b in ((0, 8), (8, 12), (12, 16)))
        expected += box_muller(
            philox(number, (torch.arange(2)[None], first, second, torch.arange(3)[:, None])), torch.float64
        )
    torch.testing.assert_close(drawn, expected / 2, rtol=1e-12, atol=0)
    assert (drawn.float().double() != drawn).any()


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_the_last_digits_of_a_noised_value_are_the_noises(secure, kind):
    """Noise that was rounded before it is added lies on a grid, on which whoever knows the value could look for the sum."""
    values = {name: torch.full((2, *shape), 1e-3, dtype=kind) for name, shape in LAYOUT.shapes.items()}
    noise = secure.for_step(0, CLIENTS, 0, 1e-3)
    released = noised(values, noise)
    on_the_grid: list[Tensor] = []
    for name, value in values.items():
        assert released[name].dtype == kind
        torch.testing.assert_close(released[name].double(), value.double() + noise[name], rtol=2e-7, atol=0)
        subtracted = released[name].double() - value.double()
        finer = (released[name].double().abs() < 0.2 * noise[name].abs()) | (kind == torch.float64)
        on_the_grid.append((subtracted.float().double() == subtracted)[finer])
    share = torch.cat(on_the_grid).double()
    assert len(share) > 200
    assert share.mean() < 0.35  # by chance; nearly all would be, were the noise rounded first


def test_words_become_normals_in_one_place():
    rows = torch.arange(5)
    drawn = words(7, rows, 1, 2, 400).view(5, 100, 4).unbind(-1)
    assert torch.equal(box_muller(drawn), normals(7, rows, 1, 2, 400))
    torch.testing.assert_close(box_muller(drawn, torch.float64), normals(7, rows, 1, 2, 400).double(), rtol=0, atol=3e-5)


def test_chacha20_is_the_published_one(monkeypatch):
    """RFC 8439, appendix A.1, test vector 1: the keystream of the zero key."""
    pytest.importorskip("cryptography")
    monkeypatch.setattr(noise_module.os, "urandom", bytes)
    first = [each[0, 0].item() for each in noise_module._chacha20_words(1, 4, torch.device("cpu"))]
    assert first == [
        int.from_bytes(bytes.fromhex(each), "little") for each in ("76b8e0ad", "a0f13d90", "405d6ae5", "5386bd28")
    ]


def test_the_worlds_generators_are_neither_used_nor_moved(secure):
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    first = secure.for_step(0, CLIENTS, 0, 1.0)["1.weight"]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002
    assert random.getstate() == before[2]
    torch.manual_seed(1)
    assert not torch.equal(secure.for_step(0, CLIENTS, 0, 1.0)["1.weight"], first)


# Plans and runs ------------------------------------------------------------------------------------------------------


def test_the_plan_says_which_noise(generator):
    assert noise_of(Plan(seed=4), LAYOUT) == SeededNoise(4, LAYOUT)
    plan = Plan(secure_noise=True, noise_generator=generator)
    assert noise_of(plan, LAYOUT) == SecureNoise(LAYOUT, generator)
    assert Plan(**plan.written()) == plan


def test_a_generator_is_for_secure_noise_only():
    with pytest.raises(PlanError, match=r"^noise_generator: chacha20 .*secure_noise"):
        Plan(noise_generator="chacha20")


def test_chacha20_without_its_package_is_refused_in_one_line_before_any_file_is_written(monkeypatch, tmp_path, federation):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    plan = training_plan(noise_generator="chacha20")
    with pytest.raises(PlanError, match=r"^noise_generator: chacha20 needs the package cryptography") as refused:
        simulate(nn.Linear(4, 3), federation, plan, out=tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def federation() -> Federation:
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(60, 4, generator=generator), torch.randint(3, (60,), generator=generator)
    return partition(data, clients=6, scheme="iid")


def training_plan(**fields: Any) -> Plan:
    usual = {"rounds": 3, "per_round": 4, "local_steps": 2, "batch_size": 3, "seed": 7_450_580_596_923_828}
    return Plan(**usual | {"secure_noise": True, "noise_multiplier": 0.5} | fields)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("fields", METHODS)
def test_two_runs_of_one_seed_differ_in_noise_and_in_what_they_draw(federation, fields, generator):
    plan = training_plan(**fields, noise_generator=generator, client_sampling="poisson", rounds=12)
    model = nn.Linear(4, 3)
    runs = [simulate(model, federation, plan) for _ in range(2)]
    assert torch.isfinite(weights(runs[0].model)).all()
    assert (weights(runs[0].model) != weights(runs[1].model)).double().mean() > 0.8
    assert runs[0].participations.tolist() != runs[1].participations.tolist()
    if "clip" in fields:
        assert runs[0].metrics[-1]["clip"] != runs[1].metrics[-1]["clip"]


@pytest.mark.parametrize("method", ["nonprivate", "dssgd"])
def test_without_privacy_there_is_no_noise_to_differ(federation, method):
    model = nn.Linear(4, 3)
    one, other = (simulate(model, federation, training_plan(method=method, secure_noise=on)).model for on in (True, False))
    assert torch.equal(weights(one), weights(other))


def test_secure_noise_is_as_strong_as_seeded_noise():
    """A network whose gradients are zero: what moves it is noise alone."""
    data = torch.zeros(60, 200), torch.randint(9, (60,), generator=torch.Generator().manual_seed(1))
    still, model = partition(data, clients=6, scheme="iid"), nn.Linear(200, 9, bias=False)
    moved = [
        (weights(simulate(model, still, training_plan(secure_noise=on)).model) - weights(model)).double().std().item()
        for on in (True, False)
    ]
    assert moved[0] == pytest.approx(moved[1], rel=6 * math.sqrt(2 / (2 * 1800)))


def test_a_stopped_run_goes_on_with_fresh_noise(federation, tmp_path):
    class StopError(Exception):
        pass

    def stop(row: dict[str, object]) -> None:
        if row["round"] == 2:
            raise StopError

    with pytest.raises(StopError):
        simulate(nn.Linear(4, 3), federation, training_plan(), out=tmp_path / "one", progress=stop)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    runs = [
        simulate(nn.Linear(4, 3), federation, training_plan(), out=tmp_path / name, resume=True) for name in ("one", "two")
    ]
    assert [row["round"] for row in runs[0].metrics] == [1, 2, 3]
    assert (weights(runs[0].model) != weights(runs[1].model)).double().mean() > 0.8


@pytest.mark.parametrize("fields", METHODS)
def test_no_key_is_in_any_file_of_the_run(federation, fields, generator, tmp_path: Path, monkeypatch):
    keys: list[bytes] = []
    drawn = noise_module.os.urandom

    def remembered(size: int) -> bytes:
        keys.append(drawn(size))
        return keys[-1]

    monkeypatch.setattr(noise_module.os, "urandom", remembered)
    plan = training_plan(**fields, noise_generator=generator)
    simulate(nn.Linear(4, 3), federation, plan, out=tmp_path / "run")
    assert keys
    files = {path.name: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert {"config.toml", "metrics.jsonl", "checkpoint.safetensors", "model.safetensors"} <= set(files)
    for content in files.values():
        for key in keys:
            for size in {8, len(key)}:
                part = key[:size]
                number = int.from_bytes(part, "little")
                forms = [part, part.hex().encode(), str(number).encode(), hex(number)[2:].encode()]
                assert not any(form in content for form in forms)
    for content in files.values():  # but for the seed of the sampling, as such
        named = re.findall(rf'"?seed"?\s*[=:]\s*{plan.seed}\b'.encode(), content)
        assert len(named) == content.count(str(plan.seed).encode())


def test_seeded_runs_take_nothing_from_the_operating_system(federation, monkeypatch):
    def never(_: int) -> bytes:
        raise AssertionError

    monkeypatch.setattr(noise_module.os, "urandom", never)
    run = simulate(nn.Linear(4, 3), federation, training_plan(secure_noise=False))
    assert len(run.metrics) == 3
    with pytest.raises(AssertionError):  # where secure noise would come from
        simulate(nn.Linear(4, 3), federation, training_plan(secure_noise=True))
