"""A training that has ended or was stopped: the model, its metrics, and every release."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedcdp.accounting.ledger import Charge
from fedcdp.accounting.population import Population
from fedcdp.config.plan import Plan
from fedcdp.data.partition import Federation
from fedcdp.training.evaluation import no_better_than_guessing
from fedcdp.training.metrics import Figures
from fedcdp.training.rundir import Row

if TYPE_CHECKING:
    from fedcdp.accounting.statement import Mode, Privacy


@dataclass(kw_only=True)
class Run:
    """A finished or stopped training, as `fedcdp.simulate` returns it.

    Examples:
        >>> import fedcdp
        >>> from torch import nn
        >>> federation = fedcdp.partition(fedcdp.load("cancer"), clients=10, scheme="iid")
        >>> run = fedcdp.simulate(nn.Linear(30, 2), federation, fedcdp.Plan(rounds=3, per_round=10, local_steps=2))
        >>> run.rounds, run.releases
        (3, 3)
        >>> sorted(run.metrics[-1])
        ['accuracy', 'clients', 'clip', 'learning_rate', 'loss', 'round', 'seconds']
        >>> answers = run.model(federation.validation.inputs).argmax(1)
    """

    plan: Plan
    """The plan that was carried out."""
    federation: Federation
    """The clients and their data."""
    model: nn.Module
    """The trained network: the moving average where the plan asks for one."""
    population: Population = field(repr=False)
    """The facts about the federation and the network that the accountant needs."""
    metrics: list[Row] = field(repr=False)
    """One dictionary for each round: its number, and where it was evaluated the task's main metric and the loss."""
    seconds: float
    """Time spent in this process."""
    client_steps: int
    """Local iterations of single clients computed in this process; where the cohort is hidden, the planned number."""
    charges: tuple[Charge, ...] = field(repr=False)
    """Every release so far. Under secure noise, a round that was repeated after a crash is listed again."""
    participations: NDArray[np.int64] = field(repr=False)
    """The number of releases that each client took part in."""
    directory: Path | None = None
    """The run directory, if the run has one."""
    engine: str = "functional"
    """The engine that computed the gradients in this process."""
    chunk: int = 1
    """How many clients it trained at once."""
    scores: Figures = field(default_factory=dict)
    """All metrics of the final model on the validation split, by name: those of the task, the loss, and your own."""
    client_scores: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """The same for each client on its own validation records, where it is known which they are: its name (`client`), their
    number (`examples`), and the metrics."""

    @property
    def releases(self) -> int:
        """The number of releases. Under secure noise, a round that was repeated after a crash counts again."""
        return len(self.charges)

    @property
    def rounds(self) -> int:
        """The number of finished rounds."""
        return int(self.metrics[-1]["round"]) if self.metrics else 0

    @property
    def accuracy(self) -> float | None:
        """Accuracy of the final model on the validation split; None without one, and for a task without classes."""
        if "accuracy" in self.scores:
            return self.scores["accuracy"]
        measured = [row["accuracy"] for row in self.metrics if row.get("accuracy") is not None]
        return measured[-1] if measured else None

    @property
    def warning(self) -> str | None:
        """What is wrong with the result: a constant answer is as good. None: nothing that validation shows."""
        return no_better_than_guessing({"accuracy": self.accuracy} | self.scores, self.federation.validation)

    def privacy(self, mode: Mode = "tight") -> Privacy:
        """State ε against every adversary for the releases of this run.

        Args:
            mode: `tight` (privacy loss distributions), `rdp`, or `paper` (as the paper computes it, which is no guarantee).

        Returns:
            One row for each adversary, unit and relation. `epsilon_used` is what the most-used client has spent.

        Raises:
            PlanError: The mode is unknown.
        """
        from fedcdp.accounting.statement import Usage, state

        most_used = np.sort(self.participations)[::-1][: self.population.copies]
        released = tuple(charge.round for charge in self.charges)
        usage = Usage(released, tuple(int(count) for count in most_used), tuple(self.participations.tolist()))
        return state(self.plan, self.population, mode=mode, rounds=released, usage=usage)

    @property
    def hides_time(self) -> bool:
        """Whether the time that the run took must not be shown: it would reveal who took part."""
        return hides_time(self.plan, self.federation)

    @property
    def us_per_client_step(self) -> float | None:
        """Microseconds for a local iteration of one client, everything included."""
        return self.seconds / self.client_steps * 1e6 if self.client_steps else None


def hides_time(plan: Plan, federation: Federation) -> bool:
    """Whether durations are not shown, because they reveal who took part where an ε assumes that nobody knows.

    Under Poisson sampling a duration tells how many clients took part; with clients of different sizes, which ones.
    """
    return plan.hides_cohort or (plan.hides_members and federation.smallest < federation.largest)
