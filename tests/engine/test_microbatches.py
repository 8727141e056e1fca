"""Batches in parts: the same results, and no more examples at once than fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fedcdp
from fedcdp.engine import Batch, FunctionalEngine, runtime
from fedcdp.engine.microbatches import MicrobatchEngine
from fedcdp.engine.recorded import RecordedEngine
from fedcdp.engine.runtime import clients_within_budget, examples_within_budget
from fedcdp.files.tree import Tree
from tests.engine.test_recorded import CLASSES, LAYERS, TOKENS, WORDS, Around, batch_of, own_weights, same


@pytest.mark.parametrize("most", [1, 3, 10])
def test_a_batch_in_parts_gives_what_the_whole_gives(most: int) -> None:
    torch.manual_seed(0)
    model, batch = Around(LAYERS["encoder layer"]()), batch_of()
    whole = RecordedEngine(model, F.cross_entropy, batch.inputs[0, :1])  # type: ignore[index]
    parts, weights = MicrobatchEngine(whole, most), own_weights(model)
    same(parts.per_example_gradients(weights, batch), whole.per_example_gradients(weights, batch))
    same(parts.plain_sum(weights, batch), whole.plain_sum(weights, batch))
    same(parts.summed_gradients(weights, batch), whole.summed_gradients(weights, batch))
    for mode in ("layer", "flat"):
        groups = whole.layout.groups(mode)
        for exact in (False, True):
            wanted = whole.clipped_sum(weights, batch, groups, 0.3, exact=exact)
            same(parts.clipped_sum(weights, batch, groups, 0.3, exact=exact), wanted)


def test_the_estimates_for_clients_and_examples_agree() -> None:
    model, example = Around(LAYERS["encoder layer"]()), torch.ones(TOKENS, dtype=torch.int64)
    for per_example in (False, True):
        for exact in (False, True):
            most = examples_within_budget(model, example, per_example, exact)
            assert clients_within_budget(model, example, most, per_example, exact) == 1
            assert clients_within_budget(model, example, most // 3, per_example, exact) >= 2


@pytest.mark.parametrize("engine", ["recorded", "functional"])
def test_a_training_beyond_its_memory_runs_in_parts(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def watched(kind: type) -> None:
        ordinary = kind.clipped_sum

        def clipped_sum(self: Any, weights: Tree, batch: Batch, *rest: Any, **options: Any) -> Tree:
            seen.append(batch.present.numel())
            return ordinary(self, weights, batch, *rest, **options)

        monkeypatch.setattr(kind, "clipped_sum", clipped_sum)

    watched(RecordedEngine)
    watched(FunctionalEngine)
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(1, WORDS, (60, TOKENS), generator=generator)
    federation = fedcdp.partition(fedcdp.Dataset(numbers, numbers[:, 0] % CLASSES, CLASSES), clients=2, scheme="iid")
    plan = fedcdp.Plan(per_round=2, rounds=2, local_steps=2, batch_size=20, noise="batch", learning_rate=0.1)
    torch.manual_seed(2)
    model = Around(LAYERS["causal attention and SwiGLU"]())
    wanted = fedcdp.simulate(model, federation, plan, engine=engine).model.state_dict()
    assert max(seen) >= 20
    seen.clear()
    most = clients_within_budget(model, numbers[0], 7, per_example=True)
    monkeypatch.setitem(runtime.BUDGET, "cpu", runtime.BUDGET["cpu"] // most)
    run = fedcdp.simulate(model, federation, plan, engine=engine)
    assert run.engine == engine
    assert max(seen) <= 8
    for name, value in run.model.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-6)
