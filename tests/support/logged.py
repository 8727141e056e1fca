"""Small trainings for loggers."""

from __future__ import annotations

import torch

import fedcdp


def federation_of() -> fedcdp.Federation:
    """Three clients of the same size, and a validation split."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 3, generator=generator)
    data = fedcdp.Dataset(inputs, (inputs[:, 0] > 0).long(), 2)
    return fedcdp.partition(data, clients=3, scheme="iid", validation=data)


def plan_of(*, hides_time: bool) -> fedcdp.Plan:
    """Five rounds; where the number of clients is secret, so are durations."""
    plan = fedcdp.Plan(rounds=5, per_round=2, local_steps=1, batch_size=4, noise_multiplier=1.0, clip_mode="flat", seed=77)
    return plan.but(method="fed-sdp", noise_at="server", client_sampling="poisson") if hides_time else plan


def shown_rows(run: fedcdp.Run) -> dict[str, dict[int, float]]:
    """The metrics of a run: for each, the value in each round that has one."""
    names = {name for row in run.metrics for name in row} - {"round"}
    return {name: {row["round"]: row[name] for row in run.metrics if row.get(name) is not None} for name in names}
