"""A training that has ended or was stopped: the model, its metrics, and every release."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedcdp.accounting.budget import Allows
from fedcdp.accounting.ledger import Charge
from fedcdp.accounting.population import Population
from fedcdp.accounting.statement import Mode, Privacy, Usage, state
from fedcdp.config.arguments import checked
from fedcdp.config.plan import Plan
from fedcdp.data.partition import Federation
from fedcdp.engine import Loss
from fedcdp.errors import PlanError, RunError
from fedcdp.training.evaluation import no_better_than_guessing
from fedcdp.training.export import export_model, format_of, settings_in, without_secrets
from fedcdp.training.metrics import Figures, OwnMetrics
from fedcdp.training.progress import Reports
from fedcdp.training.ranks import Ranks
from fedcdp.training.rundir import Row, RunDirectory
from fedcdp.training.split_evaluation import evaluate_split, reads_training_records


@dataclass(kw_only=True)
class Run:
    """A finished or stopped training, as `fedcdp.simulate` returns it and `fedcdp.open_run` reads it from disk.

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
    tf32: bool = False
    """Whether a GPU may have rounded the factors of its products; a replay must round as it did."""
    scores: Figures = field(default_factory=dict)
    """All metrics of the final model on the validation split, by name: those of the task, the loss, and your own."""
    client_scores: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """The same for each client on its own validation records, where it is known which they are: its name (`client`), their
    number (`examples`), and the metrics."""
    loss: Loss | None = field(default=None, repr=False)
    """The loss that it was trained with; None: that of the data's task."""
    own_metrics: OwnMetrics = field(default_factory=dict, repr=False)
    """Metrics of your own, by name."""
    again: Callable[..., Run] | None = field(default=None, repr=False)
    """Trains on, for `resume`."""

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

    @checked
    def privacy(self, mode: Mode = "tight") -> Privacy:
        """State ε against every adversary for the releases of this run.

        Args:
            mode: `tight` (privacy loss distributions), `rdp`, or `paper` (as the paper computes it, which is no guarantee).

        Returns:
            One row for each adversary, unit and relation. `epsilon_used` is what the most-used client has spent.

        Raises:
            PlanError: The mode is unknown.
        """
        most_used = np.sort(self.participations)[::-1][: self.population.copies]
        released = tuple(charge.round for charge in self.charges)
        usage = Usage(released, tuple(int(count) for count in most_used), tuple(self.participations.tolist()))
        return state(self.plan, self.population, mode=mode, rounds=released, usage=usage)

    @checked
    def evaluate(self, split: str = "validation", per_client: bool = False) -> dict[str, Any]:
        """Compute the metrics of the model on a split of the federation's data.

        Figures from training records are private data: no ε covers them (`reads_training_records`).

        Args:
            split: `validation`, `train` or `test`, where the federation has it.
            per_client: Also show how the main metric spreads over the clients.

        Returns:
            `split`, `examples`, `accuracy` (None where the task has none) and the other `metrics`. With `per_client` also
            the distribution of the main metric (`per_client`) and, where clients have names, the figures of each
            (`clients`). A client is judged on its own records in the split: in `train`, and in `validation` if its records
            came from clients. On any other split its accuracy is the accuracy per class, weighted by how often the client
            holds that class.

        Raises:
            RunError: The federation has no such split, or none of its records are a client's own.

        Examples:
            >>> import fedcdp
            >>> from torch import nn
            >>> federation = fedcdp.partition(fedcdp.load("cancer"), clients=10, scheme="iid")
            >>> run = fedcdp.simulate(nn.Linear(30, 2), federation, fedcdp.Plan(rounds=3, per_round=10, local_steps=2))
            >>> found = run.evaluate("validation", per_client=True)
            >>> found["examples"], found["accuracy"] == run.accuracy, sorted(found["per_client"])
            (143, True, ['max', 'mean', 'median', 'min', 'p10', 'p90'])
        """
        return evaluate_split(
            self.model, self.federation, split, per_client=per_client, loss=self.loss, own=self.own_metrics
        )

    def reads_training_records(self, split: str, per_client: bool) -> bool:
        """Whether `evaluate` computes figures from training records, which no ε covers."""
        return reads_training_records(self.federation, split, per_client)

    @checked
    def export(self, path: Path | str, format: str | None = None) -> Path:
        """Write the model or the metrics of the rounds in a format of other programs.

        Args:
            path: The file, or for TensorBoard the directory. It must not exist.
            format: `safetensors`, `torchscript` or `onnx` for the model; `csv` or `tensorboard` for the metrics. Default: by
                the suffix of `path`, which is `.safetensors`, `.pt` or `.torchscript`, `.onnx` or `.csv`; without a suffix,
                `tensorboard`.

        Returns:
            The path.

        Raises:
            RunError: The format is unknown or needs a package, or the path exists or cannot be written.

        Examples:
            >>> import fedcdp
            >>> from torch import nn
            >>> federation = fedcdp.partition(fedcdp.load("cancer"), clients=10, scheme="iid")
            >>> run = fedcdp.simulate(nn.Linear(30, 2), federation, fedcdp.Plan(rounds=3, per_round=10, local_steps=2))
            >>> run.export("model.safetensors")
            PosixPath('model.safetensors')
            >>> run.export("rounds.csv").read_text().count("\\n")
            4
        """
        to = Path(path)
        return export_model(
            format_of(to) if format is None else format,
            to,
            model=self.model,
            inputs=(self.federation.validation or self.federation.train).inputs,
            metrics=self.metrics,
            settings=without_secrets(self._settings(), self.plan),
        )

    @checked
    def resume(
        self,
        rounds: int | None = None,
        *,
        most_releases: int | None = None,
        budget: Allows | None = None,
        progress: Reports = None,
    ) -> Run:
        """Train the rounds of the plan that are left, after a run that was stopped.

        A run with a directory goes on after the last round on disk, a run in memory after its last round. All releases count
        for ε, those before and those after. Under secure noise, the noise and the draws are fresh.

        Args:
            rounds: The most rounds to train now. Default: all that are left.
            most_releases: End the training before there are more releases than this, counted from the beginning. A limit
                that `simulate` was given no longer holds.
            budget: As for `simulate`. Default: that of the run, and the `max_epsilon` of a run of the command line. A run
                directory does not store a budget from Python.
            progress: As for `simulate`. Default: that of the run.

        Returns:
            The run with the added rounds. This object stays as it is.

        Raises:
            PlanError: An argument is not allowed.
            RunError: The run directory cannot be read or written, or belongs to another run by now.

        Examples:
            >>> import fedcdp
            >>> from torch import nn
            >>> federation = fedcdp.partition(fedcdp.load("cancer"), clients=10, scheme="iid")
            >>> plan = fedcdp.Plan(rounds=5, per_round=10, local_steps=2)
            >>> run = fedcdp.simulate(nn.Linear(30, 2), federation, plan, most_releases=2)
            >>> run.rounds, run.resume(rounds=1).rounds, run.resume().releases
            (2, 3, 5)
        """
        if self.again is None:
            raise RunError("this run cannot be resumed: it was not made by simulate or open_run")
        if most_releases is not None and (type(most_releases) is not int or most_releases < 0):
            raise PlanError(f"most_releases: {str(most_releases)[:100]} is not allowed; it must be a whole number")
        changes: dict[str, Any] = {"most_rounds": rounds, "most_releases": most_releases, "ranks": Ranks.present()}
        changes |= {name: value for name, value in (("budget", budget), ("progress", progress)) if value is not None}
        return self.again(**changes)

    def _settings(self) -> dict[str, Any]:
        """The settings in the run directory; for a run in memory, the plan and its federation."""
        if self.directory is not None:
            return settings_in(RunDirectory(self.directory))
        return {"federation": self.federation.describe(), "plan": self.plan.written()}

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
