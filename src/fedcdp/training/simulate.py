"""Train a network over a federation from Python: `fedcdp.simulate`."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import nn

from fedcdp.accounting.budget import Allows
from fedcdp.config.arguments import checked
from fedcdp.config.experiment import EngineName
from fedcdp.config.plan import Plan
from fedcdp.data.partition import Federation
from fedcdp.engine import Loss
from fedcdp.errors import PlanError
from fedcdp.training.calibration import calibrate
from fedcdp.training.metrics import OwnMetrics
from fedcdp.training.planning import recommended_plan
from fedcdp.training.prepared import Prepared
from fedcdp.training.progress import Reports
from fedcdp.training.python_origin import read_origin
from fedcdp.training.ranks import Ranks
from fedcdp.training.run import Run
from fedcdp.training.rundir import RunDirectory
from fedcdp.training.trainer import check_count, train

_LOG = logging.getLogger("fedcdp")


@checked
def simulate(
    model: nn.Module,
    federation: Federation,
    plan: Plan | None = None,
    *,
    target_epsilon: float | None = None,
    adversary: str = "server",
    unit: str = "record",
    rounds: int | None = None,
    per_round: int | None = None,
    scale_inputs: bool = False,
    loss: Loss | None = None,
    metrics: OwnMetrics | None = None,
    device: str | torch.device = "cpu",
    engine: EngineName = "auto",
    chunk: int | None = None,
    tf32: bool = False,
    evaluate_every: int = 1,
    out: Path | str | None = None,
    config: str | None = None,
    resume: bool = False,
    most_releases: int | None = None,
    budget: Allows | None = None,
    progress: Reports = None,
) -> Run:
    """Train a network over a federation, according to a plan or to the recommended recipe.

    The given network stays unchanged. The trained one is `run.model`.

    In a process group of several ranks (`torch.distributed`), all ranks call this with the same arguments, train together
    and get the same run. Rank 0 alone uses `out`, `budget` and `progress`.

    Args:
        model: The network. The data's task says how many outputs it needs (`Dataset`): for classification, one for each
            class, or a single output and a binary `loss` for two classes.
        federation: The clients and their data.
        plan: Method, clip bound, noise, sampling and schedules. Without a plan, the recommended recipe is used, with noise
            calibrated to `target_epsilon`; the logger `fedcdp` names its settings. A resumed run has its plan already.
        target_epsilon: The ε to calibrate the noise to. Default: a plan's noise as it is; without a plan, 8.
        adversary: The adversary that ε is for, in the calibration and in `progress`.
        unit: The unit that this ε protects: `record`, `client` or `unique`.
        rounds: Overrides the plan's number of rounds.
        per_round: Overrides the plan's number of clients in a round.
        scale_inputs: Where no plan is given: standardise inputs, which must lie in [-1, 1], by means and variances from a
            noised release that takes a tenth of the budget. With a plan, set its `scaling_noise`.
        loss: A function of outputs and targets that returns one number: the mean, over a batch of any size, of a loss that
            each example has for itself, as in `torch.nn.functional`. fedcdp trains with one example at a time, outputs
            [1, ...] and targets [1, ...], and refuses a loss that breaks this contract. Default: that of the data's task,
            such as cross-entropy for classification.
        metrics: Metrics of your own, by name: functions of all outputs and all targets of the validation split that return
            one number. They are computed for the final model, with those of the task, into `run.scores`. For a regression
            they get outputs in the shape of the targets, and both in the targets' original unit.
        device: `cpu`, `cuda`, `cuda:1`, and so on. With several ranks, `cuda` is a GPU for each of them.
        engine: How gradients are computed. `auto` measures in a long training which engine is fastest, within a bounded
            amount of memory. A resumed run keeps its engine. The choice does not change the result beyond rounding.
        chunk: How many clients are trained at once. Chosen and kept like the engine by default.
        tf32: Let a GPU round the factors of products to 10 bits, which is faster. Norms, clipping and noise stay exact.
        evaluate_every: Rounds between evaluations on the validation split.
        out: The run directory, which is written after every round. Default: keep the run in memory only.
        config: The text of `config.toml` in the run directory. Default: the plan, and a note that the rest came from Python.
        resume: Continue the run in `out` after its last finished round.
        most_releases: End the training, with the model so far, before there are more releases than this.
        budget: Called before a round with the rounds released so far and this one. If it returns False, the training ends
            with the model so far.
        progress: A function, or several, called after each round with its metrics, a dictionary. Its attribute `epsilon` is
            the ε so far, computed when it is read (`RoundMetrics`). `fedcdp.loggers` has loggers for TensorBoard, MLflow and
            Weights & Biases.

    Returns:
        The trained network, its metrics (`run.scores`), those of each round, and all releases, for `run.privacy()`.

    Raises:
        PlanError: The plan does not fit the federation, or an argument is not allowed.
        ModelError: The network cannot be trained under this method, has too few outputs, or its loss breaks the contract.
        RunError: The run directory exists already, or cannot be resumed or written.

    Examples:
        Train to an ε with the recommended recipe:

        >>> import fedcdp
        >>> from torch import nn
        >>> federation = fedcdp.partition(fedcdp.load("cancer", scaling="public"), clients=10, scheme="iid")
        >>> run = fedcdp.simulate(nn.Linear(30, 2), federation, target_epsilon=8)
        >>> run.privacy().row("server").epsilon <= 8
        True

        Choose everything yourself:

        >>> plan = fedcdp.Plan(
        ...     rounds=20, per_round=10, local_steps=1, batch_size=42, record_sampling="partition",
        ...     clip=0.25, clip_mode="flat", noise_multiplier=1.4, learning_rate=16, ema=0.5,
        ... )
        >>> run = fedcdp.simulate(nn.Linear(30, 2), federation, plan)
        >>> run.accuracy > 0.8
        True
        >>> round(run.privacy().row("server").epsilon, 1)
        2.0

        Calibrate the noise of that plan to an ε, and show ε as it grows:

        >>> def show(round):
        ...     if round["round"] % 10 == 0:
        ...         print(round["round"], f"{round.epsilon:.1f}")
        >>> run = fedcdp.simulate(nn.Linear(30, 2), federation, plan, target_epsilon=4, progress=show)
        10 2.7
        20 4.0

        A regression, with a loss and a metric of your own:

        >>> import torch
        >>> inputs = torch.linspace(-1, 1, 120).reshape(60, 2)
        >>> data = fedcdp.Dataset(inputs, inputs.sum(1), task="regression")
        >>> federation = fedcdp.partition(data, clients=4, scheme="iid", validation=data)
        >>> plan = fedcdp.Plan(method="nonprivate", rounds=20, per_round=4, local_steps=3, learning_rate=0.2)
        >>> def distance(outputs, targets):
        ...     return (outputs.squeeze(1) - targets).abs().mean()
        >>> def within_a_tenth(outputs, targets):
        ...     return ((outputs - targets).abs() < 0.1).float().mean()
        >>> run = fedcdp.simulate(nn.Linear(2, 1), federation, plan, loss=distance, metrics={"near": within_a_tenth})
        >>> run.accuracy is None, sorted(run.scores), run.scores["r2"] > 0.9
        (True, ['loss', 'mae', 'near', 'r2', 'rmse'], True)
    """
    for name, value in (("rounds", rounds), ("per_round", per_round)):
        check_count(name, value)
    if resume and out is None:
        raise PlanError("resume: name the run directory with out")
    directory, ranks = None if out is None else RunDirectory(out), Ranks.present()
    with ranks.joined():
        given = (target_epsilon, adversary, unit, rounds, per_round, scale_inputs, evaluate_every, resume)
        ranks.agree({"plan": b"" if plan is None else plan.digest().encode(), "arguments": str(given)})

        def planned() -> Plan:
            return _planned(
                plan,
                model,
                federation,
                target_epsilon=target_epsilon,
                adversary=adversary,
                unit=unit,
                rounds=rounds,
                per_round=per_round,
                scale_inputs=scale_inputs,
                directory=directory,
                resume=resume,
            )

        prepared = Prepared.of(model, federation, ranks.once(planned))
        if directory is not None and resume and ranks.leads:
            prepared.check_origin(directory)
        if (adversary, unit) != ("server", "record"):
            from fedcdp.accounting.calibrate import Target

            Target(1.0, adversary, unit).view(
                prepared.plan, prepared.population
            )  # refuses a row that the plan does not have
        run = train(
            prepared,
            adversary=adversary,
            unit=unit,
            loss=loss,
            metrics=metrics,
            device=device,
            engine=engine,
            chunk=chunk,
            tf32=tf32,
            evaluate_every=evaluate_every,
            out=out,
            config=config,
            resume=resume,
            most_releases=most_releases,
            budget=budget,
            progress=progress,
            ranks=ranks,
        )
    if run.warning is not None and ranks.leads:
        _LOG.warning("%s", run.warning)
    return run


def _planned(
    plan: Plan | None,
    model: nn.Module,
    federation: Federation,
    *,
    target_epsilon: float | None,
    adversary: str,
    unit: str,
    rounds: int | None,
    per_round: int | None,
    scale_inputs: bool,
    directory: RunDirectory | None,
    resume: bool,
) -> Plan:
    """The plan to carry out: the given one with its changes, that of the resumed run, or the recommended recipe."""
    if directory is not None and not resume and (plan is None or target_epsilon is not None):
        directory.require_creatable()  # before a calibration that may take minutes
    origin = read_origin(directory) if directory is not None and resume else None
    if origin is not None and plan is None and target_epsilon is None:
        plan = origin[1]
    if plan is None:
        plan, said = recommended_plan(
            model,
            federation,
            target_epsilon=target_epsilon,
            adversary=adversary,
            unit=unit,
            rounds=rounds,
            per_round=per_round,
            scale_inputs=scale_inputs,
        )
        _LOG.info("%s", said)
        return plan
    if scale_inputs:
        raise PlanError("scale_inputs: it is for the recommended recipe; set the plan's scaling_noise instead")
    changes = {name: value for name, value in (("rounds", rounds), ("per_round", per_round)) if value is not None}
    plan = plan.but(**changes) if changes else plan
    if target_epsilon is None:
        return plan
    return calibrate(plan, federation, model, target_epsilon=target_epsilon, adversary=adversary, unit=unit)
