"""Cells that follow the paper's section 6: how much noise the global model tolerates, and how much it receives.

Proposition 2: the prediction for an example x of class y survives a change ξ of the weights w if

    ‖ξ‖ ≤ min over j ≠ y of (g_j's lead) = s_j(x, w) / L_j(x),    s_j = g_y − g_j,    L_j a Lipschitz constant of s_j.

Here, in the Euclidean norm (u = v = 2) and with g the logits:

- ξ is the noise that one round adds to the global model, −η/(B·K_t)·Σ of all its draws: the result of the method's own code
  for a round in which every gradient is zero;
- L_j(x) is a local estimate: the largest ‖∇_w s_j‖ at w, w + ξ/2 and w + ξ, along the path of the noise;
- w is the global model before the round; x are validation examples that w classifies correctly.

An example is *within* if its bound is at least ‖ξ‖, and *flipped* if w + ξ misclassifies it. An example that is flipped
although it is within (`exceptions`) would show that the estimate of L is too small.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, jacrev, vmap

from fedcdp.data.dataset import Dataset
from fedcdp.engine import Batch, Engine
from fedcdp.errors import PlanError
from fedcdp.files.tree import Tree, combine
from fedcdp.mechanism.sampling import choose_clients
from fedcdp.methods import METHODS
from fedcdp.methods.aggregation import Aggregate, server_update
from fedcdp.studies.reproduce.catalogue import Cell, Place
from fedcdp.studies.reproduce.cells import command, rates_of
from fedcdp.training.evaluation import evaluate
from fedcdp.training.local_engines import StepwiseEngine
from fedcdp.training.prepared import prepare_experiment
from fedcdp.training.rounds import Simulator
from fedcdp.training.rundir import State
from fedcdp.training.trainer import begin

_AT_ONCE = 50  # examples whose Jacobians [classes, weights] are held at the same time
_WAY = (0.0, 0.5, 1.0)


def measure(table: str, cell: Cell, place: Place) -> dict[str, Any]:  # noqa: ARG001
    """Train, and inspect some rounds from the first to the last."""
    (rate,) = rates_of(cell)
    experiment = cell.experiment({"plan": {"learning_rate": rate}, "run": place.run})
    splits, plan = place.splits(experiment), experiment.plan
    if not plan.per_example:
        raise PlanError(f"{cell.name}: the trade-off needs noise on examples; the method must be fed-cdp")
    if plan.server_optimizer != "sgd":
        raise PlanError(f"{cell.name}: {plan.server_optimizer} mixes a round's noise with earlier rounds; use sgd")
    device = torch.device(place.device)
    prepared = prepare_experiment(experiment, splits=splits)
    simulator, state = begin(
        prepared, prepared.network.to(device), device=device, loss=F.cross_entropy, engine=experiment.run.engine
    )
    looks = max(2, int(cell.settings.get("looks", 11)))
    looked_at = {round((plan.rounds - 1) * number / (looks - 1)) for number in range(looks)}
    examples = splits.validation.take(torch.arange(min(len(splits.validation), int(cell.settings.get("examples", 500)))))
    followed = []
    for number in range(plan.rounds):
        chosen = torch.from_numpy(choose_clients(plan, simulator.data.federation.clients, number))
        if number in looked_at:
            noise = injected(simulator, state, chosen)
            figures = borne(simulator.engine, state.weights, noise, examples, device)
            accuracy = evaluate(simulator.engine, state.weights, splits.validation, device)["accuracy"]
            followed.append({"round": number + 1, "clip": plan.clip_at(number), **figures, "accuracy": accuracy})
        state = simulator.round(state, chosen)
    ends = evaluate(simulator.engine, state.weights, splits.validation, device)["accuracy"]
    return {"command": command(cell, rate), "rate": rate, "accuracy": ends, "followed": followed}


def injected(simulator: Simulator, state: State, chosen: Tensor) -> Tree:
    """ξ: how a round would move the global model if every gradient were zero; the draws are the round's own."""
    method, data = METHODS[simulator.plan.method], simulator.data
    silent = Simulator(data, StepwiseEngine(method, _Flat(simulator.engine), data.examples), simulator.chunk)
    received = Aggregate(state.weights, simulator.plan)
    for clients in chosen.split(simulator.chunk):
        table, sizes = data.records_of(clients)
        at = silent.moment(state, clients.to(data.device), sizes)
        received.add(silent.local_engine(state.weights, data.draw(at, table, sizes), at).update)
    nobody = torch.zeros(0, dtype=torch.int64, device=simulator.data.device)
    after, _ = server_update(method, state.weights, received, simulator.moment(state, nobody, nobody))
    return combine(after, state.weights, -1.0)


class _Flat:
    """An engine whose gradients are all zero."""

    def __init__(self, engine: Engine) -> None:
        self.model, self.layout, self.loss = engine.model, engine.layout, engine.loss
        self.outputs, self.check = engine.outputs, engine.check

    def per_example_gradients(self, weights: Tree, batch: Batch) -> Tree:
        shape = batch.present.shape
        return {name: value.new_zeros(*shape, *value.shape[1:]) for name, value in weights.items()}

    def summed_gradients(self, weights: Tree, batch: Batch) -> Tree:  # noqa: ARG002
        return {name: torch.zeros_like(value) for name, value in weights.items()}

    def plain_sum(self, weights: Tree, batch: Batch) -> Tree:
        return self.summed_gradients(weights, batch)

    def clipped_sum(self, weights: Tree, batch: Batch, *_: object, **__: object) -> Tree:
        return self.summed_gradients(weights, batch)


def borne(engine: Engine, weights: Tree, noise: Tree, examples: Dataset, device: torch.device) -> dict[str, Any]:
    """The bounds of the correctly classified examples, compared with the noise."""
    norm = float(torch.stack([value.double().square().sum() for value in noise.values()]).sum().sqrt())
    bounds, flips = [], []
    for inputs, targets in zip(examples.tensor.split(_AT_ONCE), examples.targets.split(_AT_ONCE), strict=True):
        inputs, targets = inputs.to(device), targets.to(device)
        margins, slopes = zip(
            *(_margins(engine, combine(weights, noise, way), inputs, targets) for way in _WAY), strict=True
        )
        right = margins[0].amin(1) > 0
        bounds.append((margins[0] / torch.stack(slopes).amax(0)).amin(1)[right])
        flips.append((margins[-1].amin(1) <= 0)[right])
    bound, flipped = torch.cat(bounds).double().cpu(), torch.cat(flips).cpu()
    if not len(bound):
        return {"noise_norm": norm, "right": 0, "bound_q10": None, "bound_median": None, "within": None, "flipped": None,
                "exceptions": None}  # fmt: skip
    within = bound >= norm
    return {
        "noise_norm": norm,
        "right": len(bound),
        "bound_q10": float(bound.quantile(0.1)),
        "bound_median": float(bound.quantile(0.5)),
        "within": float(within.double().mean()),
        "flipped": float(flipped.double().mean()),
        "exceptions": int((within & flipped).sum()),
    }


def _margins(engine: Engine, weights: Tree, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """s_j [examples, classes] of each example, and ‖∇_w s_j‖; ∞ and 1 for the label itself."""

    def logits(at: Tree, example: Tensor) -> Tensor:
        answer: Tensor = functional_call(engine.model, at, (example[None],))[0]
        return answer

    outputs = engine.outputs(weights, inputs)
    jacobians = vmap(jacrev(logits), in_dims=(None, 0))(weights, inputs)
    squares = torch.zeros_like(outputs)
    rows = torch.arange(len(targets), device=targets.device)
    for slope in jacobians.values():
        flat = slope.flatten(2)
        squares += (flat[rows, targets][:, None] - flat).square().sum(-1)
    margins = outputs[rows, targets][:, None] - outputs
    own = F.one_hot(targets, outputs.shape[1]).bool()
    return margins.masked_fill(own, torch.inf), squares.sqrt().masked_fill(own, 1.0)
