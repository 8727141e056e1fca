"""fedcdp itself: rounds of `simulate`, engine and chunk chosen by measurement as in any long training."""

from __future__ import annotations

import torch
from turns import Task, Turns

import fedcdp
from fedcdp.data.dataset import Dataset
from fedcdp.models import build

_LONG = 100_000  # rounds, so that engine and chunk are measured


def serve(task: Task, turns: Turns) -> None:
    """A round a turn, on clients that hold as many records as they use."""
    torch.set_num_threads(1)
    records = task.records * task.per_round
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(records, *task.shape, generator=generator)
    data = Dataset(inputs, torch.randint(task.classes, (records,), generator=generator), task.classes)
    chosen = fedcdp.Plan(
        rounds=_LONG,
        per_round=task.per_round,
        local_steps=task.local_steps,
        batch_size=task.batch_size,
        clip=task.clip,
        noise_multiplier=task.noise_multiplier,
        noise="batch",
        learning_rate=task.learning_rate,
        record_sampling="partition",
        method=task.mechanism,  # type: ignore[arg-type]
        noise_at="client",
    )
    steps = task.per_round * task.local_steps
    tell_and_wait = turns.after_every_round(steps, fedcdp.__version__, f"{task.per_round} clients a round")

    def between_rounds(_: object) -> None:
        if task.device.startswith("cuda"):
            torch.cuda.synchronize()
        tell_and_wait()

    fedcdp.simulate(
        build(task.network, task.shape, task.classes),
        fedcdp.partition(data, clients=task.per_round, scheme="iid"),
        chosen,
        device=task.device,
        engine=task.engine,  # type: ignore[arg-type]
        evaluate_every=_LONG,
        progress=between_rounds,
    )
