"""fedcdp itself: rounds of its simulator; engine and chunk are chosen by measurement as in any long training."""

from __future__ import annotations

import torch
from turns import Task, Turns

import fedcdp
from fedcdp.config.experiment import MachineSettings
from fedcdp.engine.runtime import wait
from fedcdp.studies.bench.measurement import Case, synthetic
from fedcdp.training.trainer import train_experiment


def serve(task: Task, turns: Turns) -> None:
    """Each turn is a round of `per_round` clients."""
    torch.set_num_threads(1)
    plan = {
        "method": task.mechanism,
        "per_round": task.per_round,
        "batch_size": task.batch_size,
        "clip": task.clip,
        "noise_multiplier": task.noise_multiplier,
        "noise": "batch",
        "noise_at": "client",
        "learning_rate": task.learning_rate,
    }
    case = Case(task.name, synthetic(task.dataset), MachineSettings(**task.machine), plan)
    steps = task.per_round * task.local_steps
    tell_and_wait = turns.after_every_round(steps, fedcdp.__version__, f"{task.per_round} clients per round")

    def between_rounds(_: object) -> None:
        wait(torch.device(task.device))
        tell_and_wait()

    train_experiment(case.experiment(task.local_steps), None, splits=case.subject.splits, progress=between_rounds)
