"""What a training reports after each round, and to whom: functions, and loggers that keep it elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

from fedcdp.accounting.budget import accounting_is_installed
from fedcdp.config.arguments import checked
from fedcdp.errors import PlanError, RunError
from fedcdp.training.rundir import Row


class RoundMetrics(dict[str, Any]):
    """The metrics of a finished round, as in `metrics.jsonl`, with the ε spent so far.

    Examples:
        >>> import fedcdp
        >>> from torch import nn
        >>> federation = fedcdp.partition(fedcdp.load("cancer"), clients=10, scheme="iid")
        >>> plan = fedcdp.Plan(rounds=2, per_round=10, local_steps=1, noise_multiplier=2.0, clip_mode="flat")
        >>> def show(round):
        ...     print(f"round {round['round']}: ε {round.epsilon:.2f}")
        >>> run = fedcdp.simulate(nn.Linear(30, 2), federation, plan, progress=show)
        round 1: ε ...
        round 2: ε ...
    """

    def __init__(self, row: Row, epsilon: Callable[[], float]) -> None:
        super().__init__(row)
        self._epsilon = epsilon

    @cached_property
    def epsilon(self) -> float:
        """ε of all releases so far, against the `adversary` and for the `unit` that `simulate` was given.

        It is computed when it is read, which takes a fraction of a second and needs dp-accounting. For a run without privacy
        it is infinite.
        """
        return self._epsilon()


Progress = Callable[[RoundMetrics], None]
"""Called after each round."""
Reports = Progress | Iterable[Progress] | None


class Logger:
    """Keeps the metrics of a run elsewhere; pass one, or several, as `progress`. Derive from it for a service of your own.

    A logger sees the rows of `metrics.jsonl`, the settings of the plan without its seed, ε, and at the end the scores of the
    final model. Services write down when they receive a figure. Where the duration of a round must stay secret
    (`Run.hides_time`), rows are kept until the training has ended, and `open` is called only then.

    Args:
        epsilon_every: Rounds between two figures of `epsilon`; the last round always has one. 0: none.

    Raises:
        PlanError: `epsilon_every` is not a whole number of at least 0.

    Examples:
        >>> import fedcdp
        >>> from torch import nn
        >>> class Printer(fedcdp.loggers.Logger):
        ...     def write(self, row):
        ...         print(sorted(row))
        >>> federation = fedcdp.partition(fedcdp.load("cancer"), clients=10, scheme="iid")
        >>> plan = fedcdp.Plan(rounds=1, per_round=10, local_steps=1, noise_multiplier=2.0)
        >>> run = fedcdp.simulate(nn.Linear(30, 2), federation, plan, progress=Printer())
        ['accuracy', 'clients', 'clip', 'epsilon', 'learning_rate', 'loss', 'round', 'seconds']
    """

    name = "the logger"
    """What the service is called in an error."""

    @checked
    def __init__(self, *, epsilon_every: int = 10) -> None:
        if epsilon_every < 0:
            raise PlanError(f"epsilon_every: {epsilon_every} is not allowed; it must be at least 0")
        self._every = epsilon_every

    def open(self, settings: Mapping[str, Any]) -> None:
        """Called once, before the first row, with the settings that may be shown."""

    def write(self, row: Row) -> None:
        """Called with the figures of each round: `round` and its metrics, without those that were not measured."""

    def close(self, scores: Mapping[str, float], finished: bool) -> None:
        """Called once, at the end, with the scores of the final model; `finished` is False if the training was stopped."""

    # What training calls -----------------------------------------------------------------------------------------------

    def begin(self, settings: Mapping[str, Any], rounds: int, hides_time: bool) -> None:
        """A training of `rounds` rounds begins."""
        self._settings, self._rounds, self._hidden = settings, rounds, hides_time
        self._kept: list[Row] = []
        if not hides_time:
            with self._said_in_a_sentence():
                self.open(settings)

    def __call__(self, row: RoundMetrics) -> None:
        """A round has ended."""
        figures = {name: value for name, value in row.items() if value is not None}
        due = self._every and (row["round"] % self._every == 0 or row["round"] == self._rounds)
        if due and accounting_is_installed():
            with suppress(PlanError):  # no ε can be computed for this plan
                figures |= {"epsilon": row.epsilon} if math.isfinite(row.epsilon) else {}
        if self._hidden:
            self._kept.append(figures)
            return
        with self._said_in_a_sentence():
            self.write(figures)

    def end(self, scores: Mapping[str, float | None], finished: bool) -> None:
        """The training has ended, or was stopped."""
        with self._said_in_a_sentence():
            if self._hidden:
                self.open(self._settings)
                for row in self._kept:
                    self.write(row)
            self.close({name: value for name, value in scores.items() if value is not None}, finished)

    @contextmanager
    def _said_in_a_sentence(self) -> Iterator[None]:
        try:
            yield
        except RunError:
            raise
        except Exception as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise RunError(f"progress: {self.name} cannot record this run: {reason}") from error


class Audience:
    """Everybody who is told about a training."""

    def __init__(self, given: Reports) -> None:
        several = () if given is None else (given,) if callable(given) else given
        if isinstance(several, str | Mapping) or not isinstance(several, Iterable):
            raise PlanError(f"progress: {type(given).__name__} is neither a function of a round nor a list of functions")
        self.listeners = tuple(several)
        for each in self.listeners:
            if not callable(each):
                raise PlanError(f"progress: {type(each).__name__} is not a function of a round")

    @contextmanager
    def training(self, settings: Mapping[str, Any], rounds: int, hides_time: bool) -> Iterator[Audience]:
        """A training, which must call `finish` at its end: else it was stopped, and loggers keep what they have."""
        self._finished = False
        loggers = [each for each in self.listeners if isinstance(each, Logger)]
        for logger in loggers:
            logger.begin(settings, rounds, hides_time)
        try:
            yield self
        finally:
            if not self._finished:
                for logger in loggers:
                    with suppress(RunError):  # the reason for stopping is more important
                        logger.end({}, finished=False)

    def tell(self, row: Row, epsilon: Callable[[], float]) -> None:
        """Tell everybody about a round. What they do to their copy of the row does not change the run."""
        if self.listeners:
            told = RoundMetrics(row, epsilon)
            for each in self.listeners:
                each(told)

    def finish(self, scores: Mapping[str, float | None]) -> None:
        """Tell the loggers that the training has ended, and the scores of the final model."""
        self._finished = True
        for each in self.listeners:
            if isinstance(each, Logger):
                each.end(scores, finished=True)
