"""A tap that scores canaries during a training: how much of each canary's gradient an adversary finds in what it reads."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap

from fedcdp.audit.canary import as_updates
from fedcdp.audit.canary_records import Canaries
from fedcdp.audit.intervals import Numbers
from fedcdp.engine.base import Engine
from fedcdp.files.tree import Tree, each_tensor, repeat
from fedcdp.mechanism.clipping import clip
from fedcdp.mechanism.sampling import Draw, choose_records_of_steps, zero_out
from fedcdp.methods import Moment
from fedcdp.training.rounds import ClientData
from fedcdp.training.rundir import State

_AT_ONCE = 2**24  # gradient values that are scored at once
_READERS = {"type2": "example", "type1": "update", "type0": "server"}


class CanaryWatch:
    """Scores [statistics, canaries] for the adversaries `example`, `update` and `server` (`one_run` says how).

    The statistics are all tensors together and, where there are several layers, each layer alone. Call `begin` before a
    round and `end` after it.
    """

    def __init__(self, data: ClientData, engine: Engine, canaries: Canaries, adversaries: set[str]) -> None:
        self._data, self._engine, self._plan = data, engine, data.plan
        self._layers = engine.layout.layers if len(engine.layout.layers) > 1 else ()
        self._records, self._homes = canaries.records.to(data.device), canaries.clients.to(data.device)
        self._numbers = torch.full((len(data.federation.train),), -1, device=data.device)
        self._numbers[self._records] = torch.arange(len(self._records), device=data.device)
        shape = (1 + len(self._layers), len(self._records))
        self._total = {
            each: torch.zeros(shape, dtype=torch.float64, device=data.device) for each in adversaries & {*_READERS.values()}
        }
        self._round: dict[str, Tensor] = {}
        self._weights: Tree = {}
        self._local: Tree = {}
        self._slots: tuple[Tensor, Tensor] | None = None
        self._here = torch.zeros(0, dtype=torch.int64)

    @property
    def names(self) -> list[str]:
        """The statistics."""
        return ["all", *("+".join(group) for group in self._layers)]

    def begin(self, state: State, chosen: Tensor) -> None:
        """Before a round: remember its weights, and the canaries whose clients take part."""
        self._weights, self._round_number = state.weights, state.round
        self._here = torch.isin(self._homes, chosen.to(self._data.device)).nonzero()[:, 0]
        self._round = {adversary: torch.zeros_like(total) for adversary, total in self._total.items()}

    def __call__(self, reader: str, at: Moment, shown: Tree) -> None:
        """See `Moment.tap`."""
        adversary = _READERS.get(reader)
        if reader == "local-weights":
            self._local = shown
        if adversary not in self._total:
            return
        if adversary == "example":
            self._read_examples(at, shown)
        else:
            self._read_updates(adversary, at, shown)

    def end(self) -> None:
        """After a round: add its scores, weighted by the round's noise.

        Scores of updates are centred over the canaries that could be in them: what all updates have in common favours
        nobody, and canaries whose clients did not take part score 0.
        """
        noise = self._plan.noise_scale_at(self._round_number) or 1.0
        for adversary, score in self._round.items():
            if adversary != "example" and len(self._here):
                score[:, self._here] -= score[:, self._here].median(1, keepdim=True).values
            self._total[adversary] += score / noise**2

    def scores(self) -> dict[str, Numbers]:
        """The scores over all rounds."""
        return {adversary: total.cpu().numpy() for adversary, total in self._total.items()}

    def _read_updates(self, adversary: str, at: Moment, shown: Tree) -> None:
        """⟨release, g⟩ for the canaries of these clients; of all clients of the round, if the release is their sum."""
        summed = adversary == "server" and at.plan.secure_aggregation
        seen = as_updates(shown, at, lead=0 if summed else 1).double() * (-at.plan.batch_size / (at.learning_rate or 1.0))
        mine = self._here if summed else self._here[torch.isin(self._homes[self._here], at.clients)]
        for some in _pieces(mine, self._at_once()):
            row = (at.clients[None] == self._homes[some][:, None]).long().argmax(1) if not summed else None
            gradients = self._gradients(repeat(self._weights, 1), some[None], at)[0]
            self._round[adversary][:, some] += self._inner((seen if row is None else seen[row]) * gradients)

    def _read_examples(self, at: Moment, shown: Tree) -> None:
        """⟨release, g⟩ − ‖g‖²/2 for every canary that the step drew, included or not: its index is known."""
        if at.step == 0:
            self._slots = self._drawn(at)
        assert self._slots is not None
        numbers, released = self._slots[0][at.step], self._engine.layout.flatten(shown, lead=2)
        rows, slots = (self._slots[1][at.step] & (numbers >= 0)).nonzero(as_tuple=True)
        for row, slot in zip(_pieces(rows, self._at_once()), _pieces(slots, self._at_once()), strict=True):
            who = numbers[row, slot]
            gradients = self._gradients({name: value[row] for name, value in self._local.items()}, who[:, None], at)[:, 0]
            filled = (slot < released.shape[1])[:, None]  # trailing empty slots may be left out: they hold nothing
            seen = torch.where(filled, released[row, slot.clamp(max=released.shape[1] - 1)], 0.0).double()
            self._round["example"].index_add_(1, who, self._inner((seen - gradients / 2) * gradients))

    def _drawn(self, at: Moment) -> tuple[Tensor, Tensor]:
        """For all slots of the round [steps, clients, slots]: the canary's number or −1, and whether it was drawn."""
        table, sizes = self._data.records_of(at.clients.cpu())
        drawn = choose_records_of_steps(self._data.draws, at.clients, sizes, at.round)
        records = table.expand(len(drawn.positions), -1, -1).gather(2, drawn.positions)
        assert self._data.kept is not None
        kept = self._data.kept[records]  # zeroed-out records move to later slots, and the marks below move along
        numbers = zero_out(Draw(self._numbers[records], drawn.present), kept).positions
        return numbers, zero_out(Draw(drawn.present.long(), drawn.present), kept).positions.bool()

    def _gradients(self, weights: Tree, who: Tensor, at: Moment) -> Tensor:
        """The gradients of canaries [clients, canaries, coordinates] in float64; clipped, if the method clips examples."""
        records, layout = self._records[who], self._engine.layout
        present = torch.ones_like(who, dtype=torch.bool)
        gradients = self._engine.per_example_gradients(weights, self._data.examples.batch(records, present))
        if self._plan.per_example:  # the plan's own bound: an audited method may clip otherwise
            groups, bound = layout.groups(self._plan.clip_mode), self._plan.clip_at(at.round)
            gradients = clip(gradients, groups, bound, present).values
        return layout.flatten(gradients, lead=2).double()

    def _inner(self, products: Tensor) -> Tensor:
        """Sums of products [canaries, coordinates] over all coordinates, and over each layer's [statistics, canaries]."""
        tree = self._engine.layout.unflatten(products)
        sums = {name: value.flatten(1).sum(1) for name, value in tree.items()}
        everything = torch.stack(list(sums.values())).sum(0)
        return torch.stack([everything, *(torch.stack([sums[name] for name in group]).sum(0) for group in self._layers)])

    def _at_once(self) -> int:
        return max(1, _AT_ONCE // self._engine.layout.size)


def _pieces(values: Tensor, most: int) -> tuple[Tensor, ...]:
    """The values in pieces of at most so many; none if there are none."""
    return values.split(most) if len(values) else ()


def learned(data: ClientData, engine: Engine, canaries: Canaries, before: Tree, after: Tree) -> Numbers:
    """How far the loss of each canary fell in the training [1, canaries]: the score of an adversary who has the model."""
    records = canaries.records.to(data.device)
    inputs, targets = each_tensor(data.examples.inputs, lambda value: value[records]), data.examples.targets[records]

    def losses(weights: Tree) -> Tensor:
        one: Tensor = vmap(lambda output, target: engine.loss(output[None], target[None]))(
            engine.outputs(weights, inputs), targets
        )
        return one.double()

    return (losses(before) - losses(after))[None].cpu().numpy()
