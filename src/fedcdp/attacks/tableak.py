"""TabLeak: reconstruct the rows of a table from gradients (Vero et al., "TabLeak: Tabular Data Leakage in Federated
Learning", ICML 2023), after all rows that the first layer's gradient determines were solved for (`table_span.py`).

The search is theirs: a softmax for each category, an ensemble of searches from different starts, whose results are aligned
and pooled (numbers by the median, categories by the mean), and the agreement of the ensemble as a measure of confidence. Two
things differ. Without noise, a gradient is compared in a metric that weighs all its directions alike; in a plain one, a few
large directions hide those that tell rows apart. Under noise, the most likely rows under public marginals are searched for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedcdp.attacks.analytic import first_dense, invert_dense
from fedcdp.attacks.labels import infer_labels
from fedcdp.attacks.objectives import predicted, prunes
from fedcdp.attacks.observe import Captured
from fedcdp.attacks.optimisers import Adam
from fedcdp.attacks.reconstruct import Progress, Reconstruction
from fedcdp.attacks.scene import Scene
from fedcdp.attacks.table_metric import WhitenedMetric
from fedcdp.attacks.table_rows import RowSpace, decode, encode
from fedcdp.attacks.table_scores import TOLERANCE, CellScores
from fedcdp.attacks.table_span import SolvedRows, solve_rows
from fedcdp.attacks.targets import has_classes
from fedcdp.data.dataset import Dataset
from fedcdp.data.input_columns import InputColumns
from fedcdp.engine.base import Batch
from fedcdp.engine.runtime import stop_if_asked
from fedcdp.errors import DataError, ModelError, PlanError
from fedcdp.files.tree import Tree
from fedcdp.mechanism.randomness import numpy_generator, stream_key
from fedcdp.models.networks import answer_of, scaling_of

_PRIOR, _DECIDED = 0.03, 0.1  # weights, per row, of public marginals and of undecided categories, where there is no noise
_ROWS_AT_ONCE = 8192  # rows of all members and victims in one evaluation
_AGREED = 0.75  # share of the ensemble that must agree on a cell to be sure of it
_FEW = 16  # largest batch that SPEAR is tried on


@dataclass(frozen=True)
class TabLeak:
    """Settings of the attack. Pass them to `fedcdp.attack` as `attack`, or name it for the defaults: `tableak`, or
    `tableak-search`, which solves for nothing.

    Examples:
        >>> from fedcdp.attacks import TabLeak
        >>> TabLeak(members=30, steps=1500, exact=False)  # the size of the published attack, and nothing solved for
        TabLeak(members=30, steps=1500, learning_rate=0.2, exact=False)
    """

    members: int = 8
    """Searches in the ensemble; the paper has 30."""
    steps: int = 500
    """Steps of Adam in each search; the paper has 1,500."""
    learning_rate: float = 0.2
    """That of Adam; the paper has 0.06."""
    exact: bool = True
    """Whether rows are solved for before the search, where the first layer's gradient determines them."""

    def __post_init__(self) -> None:
        for name, value in (("members", self.members), ("steps", self.steps)):
            if value < 1:
                raise PlanError(f"{name}: {value} is not allowed; it must be at least 1")


@dataclass(kw_only=True)
class TableFound(Reconstruction):
    """The rows of N victims."""

    solved: Tensor
    """[victims, dummies]: the rows that were solved for; all others were searched for."""
    agreement: Tensor
    """[victims, dummies, columns]: the share of the ensemble that agrees with a cell; 1 for a row that was solved for."""

    def figures(self, present: Tensor, members: int, cells: CellScores | None) -> dict[str, Any]:
        """How the rows were found, and how far the ensemble can trust itself."""
        told: dict[str, Any] = {"rows_solved": float(self.solved[present].double().mean()), "members": members}
        if cells is not None:
            sure = self.agreement.cpu().gather(1, cells.order[..., None].expand_as(cells.right)) >= _AGREED
            sure &= cells.present[..., None]
            told["agreed_cells"] = float(sure[cells.present].double().mean())
            told["agreed_cells_right"] = float(cells.right[sure].double().mean()) if bool(sure.any()) else None
        return told


def why_no_table(scene: Scene) -> str | None:
    """Why the rows of this scene cannot be attacked as those of a table; None if they can."""
    if scene.not_real or len(scene.shape) != 1:
        return "its inputs are not the rows of a table"
    if scene.public is None or len(scene.public) < 2:
        return "there are no public rows to show what its columns are"
    if not has_classes(scene.public.task):
        return f"its task is {scene.public.task}, and the labels of other tasks than classification are not inferred"
    return None


def attack_table(
    scene: Scene, captured: Captured, settings: TabLeak, *, seed: int = 0, progress: Progress | None = None
) -> TableFound:
    """Reconstruct the rows behind every observation."""
    reason, columns, public = why_no_table(scene), scene.columns, scene.public
    if reason is not None or columns is None or public is None:
        raise DataError(f"attack: tableak does not apply here: {reason}")
    space = RowSpace.of(columns, public.tensor.to(captured.device))
    drawn = numpy_generator(seed, "table-seeds").integers(len(public), size=tuple(captured.present.shape))
    seeds = public.tensor[torch.from_numpy(drawn)].to(captured.device)
    rule = "counts" if captured.most > 1 else "gradient"
    labels = infer_labels(captured, rule, scene.classes, seeds).clone()  # type: ignore[arg-type]
    victims = len(captured)
    found = TableFound(
        examples=seeds.clone(), last=seeds, seeds=seeds, labels=labels,
        loss=torch.full((victims,), torch.inf, device=captured.device),
        iterations=torch.ones(victims, dtype=torch.int64, device=captured.device),
        outcome=torch.zeros(victims, dtype=torch.int64, device=captured.device),
        solved=torch.zeros_like(captured.present), agreement=captured.present[..., None].repeat(1, 1, len(columns)).float(),
    )  # fmt: skip
    left, begun = list(range(victims)), dict[int, Tensor]()
    if settings.exact and captured.steps == 1 and not prunes(captured) and not captured.noisy:
        left = [each for each in left if not _solve(found, captured, scene, columns, each, seed, begun, progress)]
    for some in torch.tensor(left, dtype=torch.int64).split(max(1, _ROWS_AT_ONCE // (captured.most * settings.members))):
        if len(some):
            _search(found, captured.take(some.to(captured.device)), some, space, public, settings, seed, begun, progress)
    found.last = found.examples
    if progress is not None:
        progress(1, 1)
    return found


def _solve(
    found: TableFound, captured: Captured, scene: Scene, columns: InputColumns, victim: int, seed: int,
    begun: dict[int, Tensor], progress: Progress | None,
) -> bool:  # fmt: skip
    """Solve for the rows of one victim; whether all were found. If only some were, the search begins at them."""
    stop_if_asked()
    assert scene.public is not None
    count = int(captured.present[victim].sum())
    solved = _solved(captured, scene, columns, scene.public, victim, count, seed)
    if progress is not None:
        progress(victim + 1, 2 * len(captured))
    if not len(solved.rows):
        return False
    rows = encode(decode(solved.rows, columns), columns).to(found.examples)
    found.labels[victim] = _with_labels(found.labels[victim], solved.labels.to(found.labels), count)
    if not solved.complete or len(rows) < count:
        begun[victim] = rows
        return False
    found.examples[victim, :count] = rows
    found.solved[victim, :count] = True
    found.outcome[victim], found.loss[victim] = Reconstruction.CONVERGED, 0.0
    return True


def _with_labels(labels: Tensor, first: Tensor, count: int) -> Tensor:
    """The labels of a batch in an order that begins with those that are known; the others as often as they are missing."""
    rest = labels[:count].tolist()
    for label in first.tolist():
        if label in rest:
            rest.remove(label)
    kept = [*first.tolist(), *rest][:count]
    return torch.cat([torch.tensor(kept, dtype=labels.dtype, device=labels.device), labels[count:]])


def _solved(
    captured: Captured, scene: Scene, columns: InputColumns, public: Dataset, victim: int, count: int, seed: int
) -> SolvedRows:
    """The rows of one victim that the gradient of a dense first layer determines."""
    nothing = SolvedRows(public.tensor[:0], torch.zeros(0, dtype=torch.int64), complete=False)
    try:
        weight, bias = first_dense(scene.network, captured.shape)
    except ModelError:
        return nothing
    scaling = scaling_of(scene.network)
    gradient, of_bias = captured.seen[weight][victim].cpu(), None if bias is None else captured.seen[bias][victim].cpu()
    if scaling is not None and of_bias is None:
        return nothing
    hints = public.tensor[:0]
    if all(column.is_number for column in columns) and 1 < count <= _FEW:
        own = {name: captured.weights[name][victim] for name in (weight, bias) if name is not None}
        spear = invert_dense(gradient, of_bias, count, weight=own[weight], bias=own.get(bias or ""), seed=seed)
        if not spear.up_to_scale:
            hints = spear.inputs if scaling is None else scaling.undo(spear.inputs)
    if of_bias is not None:
        if scaling is not None:  # of raw inputs x, where the layer reads u = (x − μ)s
            gradient = gradient / scaling.scale.cpu() + of_bias[:, None] * scaling.mean.cpu()
        gradient = torch.cat([gradient, of_bias[:, None]], dim=1)
    layer = dict(scene.network.named_modules())[weight.rpartition(".")[0]]
    weights = {name: value[victim] for name, value in captured.weights.items()}

    def directions(rows: Tensor, labels: Tensor) -> Tensor:
        return _by_outputs(scene, layer, weights, rows.to(captured.device), labels.to(captured.device)).cpu()

    return solve_rows(
        gradient, count, columns, public.tensor, directions, labels=scene.classes, bias=of_bias is not None, seed=seed,
        hints=hints,
    )  # fmt: skip


def _by_outputs(scene: Scene, layer: nn.Module, weights: Tree, rows: Tensor, labels: Tensor) -> Tensor:
    """The gradient of each row's loss by the outputs of a layer [k, units]."""
    kept: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, outputs: Tensor) -> Tensor:
        kept.append(outputs.detach().requires_grad_())
        return kept[0]

    handle = layer.register_forward_hook(keep)
    try:
        with torch.enable_grad():
            outputs = answer_of(torch.func.functional_call(scene.network, weights, (rows,)))
            losses = torch.func.vmap(lambda one, label: scene.engine.loss(one[None], label[None]))(outputs, labels)
            (gradient,) = torch.autograd.grad(losses.sum(), kept[0])
    finally:
        handle.remove()
    return gradient


def _search(
    found: TableFound, part: Captured, who: Tensor, space: RowSpace, public: Dataset, settings: TabLeak, seed: int,
    begun: dict[int, Tensor], progress: Progress | None,
) -> None:  # fmt: skip
    """Search for the rows of some victims with an ensemble, and pool its results."""
    victims, members, dummies = len(part), settings.members, part.most
    generator = torch.Generator().manual_seed(stream_key(seed, "tableak", int(who[0])) >> 1)
    start = space.begin(public.tensor, (victims, members, dummies), generator)
    for place, victim in enumerate(who.tolist()):
        if (rows := begun.get(victim)) is not None:
            start[place, :, : len(rows)] = space.free_of(rows)
    many = part.take(torch.arange(victims, device=part.device).repeat_interleave(members))
    labels = found.labels[who.to(found.labels.device)].repeat_interleave(members, 0)
    loss_of = _Loss(many, labels, space)
    state = Adam(settings.learning_rate, inner=1, total=settings.steps).begin(start.flatten(2).flatten(0, 1))
    loss = state.loss
    for step in range(settings.steps):
        stop_if_asked()
        loss, _ = state.step(lambda free, _: loss_of(free, step / settings.steps))  # noqa: B023  (used at once)
        state.point = space.kept(state.point.view(-1, dummies, space.size)).flatten(1)
        if progress is not None and step % 20 == 0:
            progress(settings.steps + step, 2 * settings.steps)
    rows = space.rows(state.point.view(victims, members, dummies, space.size))
    losses = loss.view(victims, members)
    for place, victim in enumerate(who.tolist()):
        count = int(part.present[place].sum())
        best, agreement = _pooled(rows[place, :, :count], losses[place], space.columns)
        found.examples[victim, :count], found.agreement[victim, :count] = best, agreement
        found.loss[victim], found.iterations[victim] = losses[place].min(), settings.steps
    found.evaluations += victims * members * settings.steps


class _Loss:
    """The loss of free values [victims × members, dummies × size], and its gradient."""

    def __init__(self, many: Captured, labels: Tensor, space: RowSpace) -> None:
        self.many, self.labels, self.space = many, labels, space
        self.metric = None if many.noisy else WhitenedMetric.of(many.seen, shared_only=prunes(many))
        clips = many.plan.per_example or many.plan.method == "fed-sdp"
        self.by_method = many.steps > 1 or (clips and not many.noisy)

    def __call__(self, free: Tensor, share: float) -> tuple[Tensor, Tensor]:
        free = free.detach().requires_grad_()
        own = free.view(len(self.labels), -1, self.space.size)
        shown = self._shown(self.space.rows(own))
        present, many = self.many.present, self.many
        surprise = (self.space.surprise(own) * present).sum(1)
        if self.metric is None:  # −log of the posterior density
            misfit = sum((shown[name] - value).flatten(1).square().sum(1) for name, value in many.seen.items())
            loss = misfit / (2 * many.deviation.to(free).square()) + surprise
        else:
            undecided = (self.space.entropy(own) * present).sum(1)
            beside = (_PRIOR * surprise + _DECIDED * share * undecided) / present.sum(1) / len(self.space.columns)
            loss = self.metric.between(shown) + beside
        (gradient,) = torch.autograd.grad(loss.sum(), free)
        return loss.detach(), gradient

    def _shown(self, rows: Tensor) -> Tree:
        many = self.many
        if self.by_method:
            return predicted(many, "method", rows, self.labels, many.present)
        summed = many.engine.plain_sum(many.weights, Batch(rows, self.labels, many.present))
        part = many.means / many.present.sum(1)
        return {name: value * part.view(-1, *(1,) * (value.dim() - 1)) for name, value in summed.items()}


def _pooled(rows: Tensor, losses: Tensor, columns: InputColumns) -> tuple[Tensor, Tensor]:
    """The rows [dummies, n] of an ensemble [members, dummies, n], and the share of members that agree with each cell."""
    from scipy.optimize import linear_sum_assignment

    order = losses.argsort()
    best = rows[order[0]]
    aligned = []
    for member in order.tolist():
        costs = torch.cdist(best, rows[member]).square().cpu().numpy()
        aligned.append(rows[member][torch.from_numpy(linear_sum_assignment(costs)[1])])
    together = torch.stack(aligned)
    numbers = torch.zeros(rows.shape[-1], dtype=torch.bool, device=rows.device)
    for column in columns:
        numbers[column.inputs] = column.is_number
    middle = torch.where(numbers, together.median(0).values, together.mean(0))
    cells, each = decode(middle, columns), decode(together, columns)
    numbers = torch.tensor([column.is_number for column in columns], device=rows.device)
    near = torch.where(numbers, TOLERANCE * each.std((0, 1)).clamp(min=1e-6), 0.5)
    agreement = ((each - cells).abs() <= near).float().mean(0)
    return encode(cells, columns), agreement
