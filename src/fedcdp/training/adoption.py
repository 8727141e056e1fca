"""DP-SGD in the words of Opacus, as a plan: `fedcdp.make_private`.

| Opacus | plan |
| --- | --- |
| `max_grad_norm` | `clip`, over the whole gradient (`clip_mode = flat`) |
| `noise_multiplier` | `noise_multiplier` with `noise = batch`: N(0, (σC)²) on the sum of a batch |
| Poisson sampling at the rate 1 / steps per epoch | `record_sampling = poisson` |
| division by the expected batch size, ⌊N / steps per epoch⌋ | `batch_size` |
| an optimiser's step | a round in which every client takes one local step |

With one client this is DP-SGD (Abadi et al. 2016). With several clients it is Fed-CDP: a step draws from each client's
records at the same rate, and each client adds the noise to its own sum. So the server's ε for a record stays the same, and
the mean of K clients carries √K times the noise of one client that holds all records.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn
from torch.utils.data import DataLoader

from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Splits
from fedcdp.data.partition import Federation, partition
from fedcdp.errors import PlanError
from fedcdp.training.calibration import calibrate
from fedcdp.training.prepared import Prepared
from fedcdp.training.run import Run
from fedcdp.training.simulate import simulate

if TYPE_CHECKING:
    from fedcdp.accounting.statement import Privacy

# Fields of the plan that `make_private` sets itself, and what to do instead.
_CHOSEN = dict.fromkeys(
    ("method", "local_steps", "noise", "record_sampling"), "make a fedcdp.Plan and call fedcdp.simulate to choose it"
) | {
    "rounds": "use epochs",
    "per_round": "use clients",
    "clip": "use max_grad_norm",
    "delta": "use target_delta",
    "momentum": "a step is a round, so momentum within a round has no effect",
}
_RARE = 1e-3  # the share of δ that steps with more records than slots may reach


@dataclass(frozen=True, repr=False)
class PrivateTraining:
    """A model, its clients and a plan: what `make_private` returns. Nothing is trained before `train` is called.

    Examples:
        >>> import fedcdp, torch
        >>> data = (torch.rand(600, 4), torch.arange(600) % 2)
        >>> private = fedcdp.make_private(
        ...     torch.nn.Linear(4, 2), data, epochs=3, batch_size=60, learning_rate=0.5, noise_multiplier=1.1
        ... )
        >>> private.plan.rounds, private.steps_per_epoch
        (30, 10)
        >>> round(private.privacy().row("server").epsilon, 2)
        3.48
        >>> private.train().releases
        30
    """

    model: nn.Module
    """The given network, which stays unchanged."""
    federation: Federation
    """The clients and their data: one client, unless you asked for more."""
    plan: Plan
    """All settings. A round is one step."""
    steps_per_epoch: int
    """The number of steps in which each record is drawn once on average."""

    def privacy(self) -> Privacy:
        """State ε against every adversary after all epochs, before training. The row `server` is the ε of Opacus.

        Returns:
            One row for each adversary, unit and relation.
        """
        return self.plan.privacy(self.federation, model=self.model)  # type: ignore[no-any-return]

    def train(self, **options: Any) -> Run:
        """Train the model.

        Args:
            **options: Arguments of `fedcdp.simulate`, such as `loss`, `metrics`, `device` and `out`. By default, the model
                is evaluated once an epoch.

        Returns:
            The run: the trained model is `run.model`, and `run.privacy()` states the ε that was spent.
        """
        return simulate(self.model, self.federation, self.plan, **{"evaluate_every": self.steps_per_epoch} | options)

    def __repr__(self) -> str:
        plan = self.plan
        records = plan.per_round * plan.batch_size
        return (
            f"<PrivateTraining: {self.federation.describe()}; {plan.rounds} steps of {records} records on average, "
            f"C = {plan.clip}, σ = {plan.noise_multiplier:.4g}>"
        )


def make_private(
    model: nn.Module,
    dataset: Any,
    *,
    epochs: int,
    learning_rate: float | str,
    batch_size: int | None = None,
    clients: int | None = None,
    max_grad_norm: float | str = 1.0,
    noise_multiplier: float | None = None,
    target_epsilon: float | None = None,
    target_delta: float = 1e-5,
    validation: Any = None,
    seed: int = 0,
    **settings: Any,
) -> PrivateTraining:
    """Prepare DP-SGD on a dataset, in the words of Opacus; with `clients`, the same over a federation.

    A step draws each record independently, clips each gradient at `max_grad_norm`, adds N(0, (σC)²) to their sum, and
    divides by the expected batch size. As in Opacus, an epoch is ⌈N / batch_size⌉ steps, and the sampling rate is one over
    this number.

    Args:
        model: The network. It stays unchanged.
        dataset: Anything that `fedcdp.as_dataset` reads, such as a `DataLoader`, a `Dataset` or a pair of tensors; `Splits`,
            which bring their validation data; or a `Federation`, whose clients all take part in every step.
        epochs: How often each record is drawn on average.
        learning_rate: Learning rate of SGD: a number or a schedule.
        batch_size: Expected number of records in a step, over all clients. Default: that of a `DataLoader`.
        clients: Divide the records at random among so many clients. Default: one client, which is DP-SGD.
        max_grad_norm: Clip bound C for the norm of a record's whole gradient: a number or a schedule.
        noise_multiplier: Noise multiplier σ, over C. Give either this or `target_epsilon`.
        target_epsilon: Calibrate σ to this ε per record against the server, after all epochs.
        target_delta: δ of the privacy guarantee.
        validation: Records for evaluation, of any kind that `fedcdp.as_dataset` reads. No ε protects them.
        seed: Fixes all randomness.
        **settings: More fields of `fedcdp.Plan`, such as `secure_noise`, `ema` or `clip_mode`.

    Returns:
        The training, ready to start: `privacy()` states ε, and `train()` trains.

    Raises:
        PlanError: An argument is missing or not allowed, or no noise reaches the ε.
        ModelError: The network cannot be trained privately, because a layer mixes examples.
        DataError: The data cannot be read.

    Examples:
        >>> import fedcdp
        >>> from torch import nn
        >>> data = fedcdp.load("cancer", scaling="public")
        >>> private = fedcdp.make_private(
        ...     nn.Linear(30, 2), data, epochs=5, batch_size=50, learning_rate=4, target_epsilon=3
        ... )
        >>> private
        <PrivateTraining: 1 client × 426 records, ...; 45 steps of 47 records on average, C = 1, σ = 1.396>
        >>> run = private.train()
        >>> run.accuracy > 0.8, run.privacy().row("server").epsilon <= 3
        (True, True)
    """
    if (noise_multiplier is None) == (target_epsilon is None):
        raise PlanError("noise_multiplier, target_epsilon: give exactly one of them")
    for name in settings.keys() & _CHOSEN.keys():
        raise PlanError(f"{name}: make_private sets it; {_CHOSEN[name]}")
    for name, value in (("epochs", epochs), ("batch_size", batch_size)):
        if value is not None and (type(value) is not int or value < 1):
            raise PlanError(f"{name}: {value!r} is not allowed; it must be a whole number of at least 1")
    federation = _federation(dataset, clients, validation, seed)
    held = int(federation.sizes(np.arange(federation.clients)).sum())
    steps = _steps_per_epoch(dataset, batch_size, federation.clients, held)
    expected = max(1, held // (steps * federation.clients))
    unequal = federation.smallest < federation.largest
    usual: dict[str, Any] = {"clip_mode": "flat", "weighting": "records" if unequal else "equal"}
    plan = Plan(
        method="fed-cdp",
        rounds=epochs * steps,
        per_round=federation.clients,
        local_steps=1,
        batch_size=expected,
        clip=max_grad_norm,
        noise_multiplier=1.0 if noise_multiplier is None else noise_multiplier,
        noise="batch",
        record_sampling="poisson",
        learning_rate=learning_rate,
        delta=target_delta,
        seed=seed,
        **usual | settings,
    )
    if "slots" not in settings:
        plan = plan.but(slots=min(_enough_slots(plan), max(expected, federation.largest)))
    Prepared.of(model, federation, plan)  # refuses a network that cannot be trained, before anybody waits
    if target_epsilon is not None:
        plan = calibrate(plan, federation, model, target_epsilon=target_epsilon)
    return PrivateTraining(model, federation, plan, steps)


def _federation(dataset: Any, clients: int | None, validation: Any, seed: int) -> Federation:
    """The clients: those of a federation, the owners of the records, or `clients` with equal shares, one by default."""
    if isinstance(dataset, Federation):
        if clients is not None or validation is not None:
            raise PlanError("clients, validation: leave them out, because a Federation has both")
        return dataset
    if isinstance(dataset, Splits) and dataset.owners is not None:
        return partition(dataset, clients, validation=validation, seed=seed)
    return partition(dataset, 1 if clients is None else clients, "iid", validation=validation, seed=seed)


def _steps_per_epoch(dataset: Any, batch_size: int | None, clients: int, held: int) -> int:
    """⌈N / batch_size⌉; for a DataLoader that brings the batch size, its number of batches."""
    if batch_size is None:
        if not isinstance(dataset, DataLoader) or dataset.batch_size is None:
            raise PlanError("batch_size: give it; only a DataLoader with a batch size brings one")
        batch_size = dataset.batch_size
        steps = held // batch_size if dataset.drop_last else -(-held // batch_size)
    else:
        steps = -(-held // batch_size)
    if batch_size < clients:
        raise PlanError(f"batch_size: {batch_size} is not allowed; {clients} clients need at least {clients} records a step")
    return max(1, steps)


def _enough_slots(plan: Plan) -> int:
    """So many slots that a step hardly ever draws more records: each step with a probability of at most δ/1000/steps.

    A record that finds no slot is dropped, and the accountant charges for that. Chernoff's bound for a Poisson number with
    mean B covers every number of records: P(X ≥ S) ≤ exp(−(S ln(S/B) − S + B)).
    """
    expected = plan.batch_size
    wanted = math.log(plan.rounds / (_RARE * plan.delta))
    slots = expected
    while slots * math.log(slots / expected) - slots + expected < wanted:
        slots += max(1, (slots - expected) // 8)
    return slots
