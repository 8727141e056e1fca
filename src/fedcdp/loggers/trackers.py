"""Loggers for TensorBoard, MLflow and Weights & Biases.

They log the metrics of each round as in `metrics.jsonl`, ε now and then, the settings of the plan, and at the end the scores
of the final model. None of it is from before the noise. The seed of a private plan is not logged.

| | TensorBoard | MLflow | Weights & Biases |
| --- | --- | --- | --- |
| a round's metrics | scalars, step = round | metrics, step = round | `log`, step = round |
| the plan | text `config` | parameters | `config` |
| scores of the final model | scalars `final/…` | metrics `final_…` | summary `final/…` |

All three note the time of each figure. `Logger` therefore sends them at the end where durations must stay secret. Metrics of
the machine, such as its load, are never recorded: they would show durations as well.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcdp.config.arguments import checked
from fedcdp.errors import RunError
from fedcdp.files.installation import install_command
from fedcdp.training.export import add_scalars, board_writer
from fedcdp.training.progress import Logger
from fedcdp.training.rundir import Row

_LONGEST_VALUE = 500  # characters of a parameter in MLflow


class TensorBoardLogger(Logger):
    """Write event files for TensorBoard.

    Args:
        directory: Where TensorBoard looks for the run. Each training adds a file.
        epsilon_every: Rounds between two figures of `epsilon`; the last round always has one. 0: none.

    Raises:
        RunError: During the training: TensorBoard is not installed, or the directory cannot be written.

    Examples:
        >>> import fedcdp
        >>> from torch import nn
        >>> federation = fedcdp.partition(fedcdp.load("cancer"), clients=10, scheme="iid")
        >>> plan = fedcdp.Plan(rounds=2, per_round=10, local_steps=1)
        >>> logger = fedcdp.loggers.TensorBoardLogger("board")
        >>> run = fedcdp.simulate(nn.Linear(30, 2), federation, plan, progress=logger)
    """

    name = "TensorBoard"

    @checked
    def __init__(self, directory: Path | str, *, epsilon_every: int = 10) -> None:
        super().__init__(epsilon_every=epsilon_every)
        self._directory = Path(directory)

    def open(self, settings: Mapping[str, Any]) -> None:
        """See `Logger`."""
        try:
            self._writer = board_writer(self._directory, settings)
        except ImportError as error:
            raise RunError(f"progress: TensorBoard is not installed; {install_command('report')} installs it") from error

    def write(self, row: Row) -> None:
        """See `Logger`."""
        self._last = row["round"]
        add_scalars(self._writer, row)
        self._writer.flush()

    def close(self, scores: Mapping[str, float], finished: bool) -> None:  # noqa: ARG002
        """See `Logger`."""
        for name, value in scores.items():
            self._writer.add_scalar(f"final/{name}", value, self._last)
        self._writer.close()


class MLflowLogger(Logger):
    """Log to an MLflow tracking server, or to its files or database.

    A logger has one MLflow run. It goes on with it when a training is resumed with the same logger, or with a new one that
    is given `run_id`.

    Args:
        tracking_uri: The server or store, such as `http://tracking:5000` or `sqlite:///mlflow.db`. Default: MLflow's own.
        experiment: The name of the experiment, which is created if there is none.
        run_name: The name of the run.
        run_id: An MLflow run to go on with.
        epsilon_every: Rounds between two figures of `epsilon`; the last round always has one. 0: none.

    Raises:
        RunError: During the training: MLflow is not installed, or does not accept the figures.

    Examples:
        >>> import fedcdp
        >>> logger = fedcdp.loggers.MLflowLogger("sqlite:///mlflow.db", experiment="hospitals")
        >>> logger.run_id is None  # until a training has begun
        True
    """

    name = "MLflow"

    @checked
    def __init__(
        self,
        tracking_uri: str | None = None,
        *,
        experiment: str = "fedcdp",
        run_name: str | None = None,
        run_id: str | None = None,
        epsilon_every: int = 10,
    ) -> None:
        super().__init__(epsilon_every=epsilon_every)
        self._uri, self._experiment, self._run_name = tracking_uri, experiment, run_name
        self.run_id = run_id
        """The MLflow run."""

    def open(self, settings: Mapping[str, Any]) -> None:
        """See `Logger`."""
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
        except ImportError as error:
            raise RunError("progress: MLflow is not installed; pip install mlflow installs it") from error
        # A client of its own: the fluent functions would use and change the active run of the process.
        self._client, self._metric = MlflowClient(tracking_uri=self._uri), Metric
        if self.run_id is None:
            known = self._client.get_experiment_by_name(self._experiment)
            place = self._client.create_experiment(self._experiment) if known is None else known.experiment_id
            self.run_id = self._client.create_run(place, run_name=self._run_name).info.run_id
            params = [Param(name, str(value)[:_LONGEST_VALUE]) for name, value in _flat(settings).items()]
            self._client.log_batch(self.run_id, params=params)
        else:
            self._client.update_run(self.run_id, status="RUNNING")

    def write(self, row: Row) -> None:
        """See `Logger`."""
        self._log({name: value for name, value in row.items() if name != "round"}, row["round"])

    def close(self, scores: Mapping[str, float], finished: bool) -> None:
        """See `Logger`."""
        self._log({f"final_{name}": value for name, value in scores.items()}, self._last)
        self._client.set_terminated(self.run_id, status="FINISHED" if finished else "KILLED")

    def _log(self, figures: Mapping[str, float], step: int) -> None:
        self._last = step
        now = int(time.time() * 1000)
        metrics = [self._metric(name, float(value), now, step) for name, value in figures.items()]
        if metrics:
            self._client.log_batch(self.run_id, metrics=metrics)


class WandbLogger(Logger):
    """Log to Weights & Biases.

    W&B also stores facts about the machine and the program, such as host name, command line and installed packages. Metrics
    of the machine, what the program prints, and its code are switched off.

    Args:
        project: The project.
        name: The name of the run. Default: W&B invents one.
        mode: `online`, `offline` (files only) or `disabled`. Default: the environment's, `WANDB_MODE`.
        directory: Where W&B keeps its files. Default: the current directory.
        epsilon_every: Rounds between two figures of `epsilon`; the last round always has one. 0: none.

    Raises:
        RunError: During the training: wandb is not installed, or does not accept the figures.

    Examples:
        >>> import fedcdp
        >>> logger = fedcdp.loggers.WandbLogger("hospitals", mode="offline")
    """

    name = "Weights & Biases"

    @checked
    def __init__(
        self,
        project: str = "fedcdp",
        *,
        name: str | None = None,
        mode: str | None = None,
        directory: Path | str | None = None,
        epsilon_every: int = 10,
    ) -> None:
        super().__init__(epsilon_every=epsilon_every)
        self._given = {
            "project": project, "name": name, "mode": mode, "dir": None if directory is None else str(directory),
        }  # fmt: skip
        self._id: str | None = None

    def open(self, settings: Mapping[str, Any]) -> None:
        """See `Logger`."""
        try:
            import wandb
        except ImportError as error:
            raise RunError("progress: wandb is not installed; pip install wandb installs it") from error
        quiet = wandb.Settings(x_disable_stats=True, console="off", disable_code=True, disable_git=True)
        self._run = wandb.init(
            **self._given, id=self._id, resume=None if self._id is None else "allow", config=dict(settings),
            settings=quiet, reinit="create_new",
        )  # fmt: skip
        self._id = self._run.id

    def write(self, row: Row) -> None:
        """See `Logger`."""
        self._run.log({name: value for name, value in row.items() if name != "round"}, step=row["round"])

    def close(self, scores: Mapping[str, float], finished: bool) -> None:
        """See `Logger`."""
        self._run.summary.update({f"final/{name}": value for name, value in scores.items()})
        self._run.finish(exit_code=0 if finished else 1)


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of all sections under `section.name`; those without a value are left out."""
    found: dict[str, Any] = {}
    for section, values in settings.items():
        named = values.items() if isinstance(values, Mapping) else [("", values)]
        found |= {f"{section}.{name}".rstrip("."): each for name, each in named if each is not None}
    return found
