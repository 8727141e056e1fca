"""The campaign of attacks on presets: which cells it has, and its figures for presence."""

from __future__ import annotations

import pytest

from benchmarks.preset_attacks import PRESETS, READERS, after, allowed, cells, closeness, markdown


def test_every_preset_is_attacked_as_every_reader() -> None:
    keys = {cell.key for cell in cells(PRESETS)}
    assert {f"{name}/{reader}" for name in PRESETS for reader in READERS if reader != "type0"} <= keys
    assert "cancer-sum-eps1/type0" in keys


def test_a_server_that_reads_each_update_is_attacked_as_type_1() -> None:
    assert "mnist-eps1/type0" not in {cell.key for cell in cells(PRESETS)}
    table = markdown({"mnist-eps1/presence": {"auc_all_rounds": 0.575}})
    assert "| `mnist-eps1` | – | – | the same | 0.575 | 0.575 |" in table


def test_sums_of_many_records_are_not_reconstructed() -> None:
    assert "mnist-sum-eps1/type0" not in {cell.key for cell in cells(PRESETS)}
    table = markdown({f"{name}-sum-eps1/presence": {"auc_all_rounds": 0.575} for name in ("mnist", "cancer")})
    assert "| `mnist-sum-eps1` | – | – | not tried: 50,000 | 0.575 |" in table
    assert "| `cancer-sum-eps1` | – | – | – | 0.575 |" in table


def test_commands_and_keys_name_their_options() -> None:
    found = {cell.key: cell.command for cell in cells(("mnist-eps1",))}
    assert found["mnist-eps1/type2/batch"] == "attack --preset mnist-eps1 --leak type2 --noise batch"
    assert found["mnist-eps1/presence"] == "attack --preset mnist-eps1 --leak type0 --attack matched-filter"

    fewer = {cell.key: cell.command for cell in cells(("cancer-sum-eps1",), 20)}
    assert fewer["cancer-sum-eps1/type2"] == "attack --preset cancer-sum-eps1 --leak type2 --victims 20"
    assert not any("--victims" in fewer[f"cancer-sum-eps1/{reader}"] for reader in ("type1", "type0", "presence"))


@pytest.mark.parametrize(("mu", "releases"), [(0.1, 4), (0.03, 100)])
def test_distances_of_gaussian_releases_add_up_in_squares(mu: float, releases: int) -> None:
    from statistics import NormalDist

    one = NormalDist().cdf(mu / 2**0.5)
    assert after(one, releases) == pytest.approx(NormalDist().cdf(mu * releases**0.5 / 2**0.5), rel=1e-9)
    assert after(0.5, releases) == 0.5


def test_the_allowed_auc_is_that_of_the_gaussian_mechanism() -> None:
    # μ = .26805, .50155 and 1.66603 at δ = 1e-5, computed independently.
    assert [allowed(epsilon) for epsilon in (1, 2, 8)] == pytest.approx([0.5752, 0.6386, 0.8806], abs=1e-4)


def test_cells_that_were_not_measured_are_dashes() -> None:
    cell = {"label_accuracy": 1.0, "success_rate": 0.5, "recognisable_rate": None, "identified_rate": 0.25, "examples": 40}
    table = markdown({"cancer-eps1/type2": cell})
    assert "| `cancer-eps1` | 100 / 50 / 25 of 40 | – | the same | – | 0.575 |" in table
    assert "adult-eps1" not in table


def test_closeness_is_the_share_of_the_allowed_advantage() -> None:
    half, full = 0.5 + (allowed(1) - 0.5) / 2, allowed(1)
    stored = {"mnist-eps1/presence": {"auc_all_rounds": half}, "lfw-eps1/presence": {"auc_all_rounds": full}}
    table = closeness(stored | {"adult-sum-eps8/presence": {"auc_all_rounds": 0.5}})
    assert "| 1 | each update | 2 | .538 to .575 | .575 | 50 % to 100 % |" in table
    assert "| 8 | the sum | 1 | .500 | .881 | 0 % |" in table
    assert "\n| 2 |" not in table
