"""Tokens of texts from gradients: which token ids the sequences of a victim hold, and where they stand.

| source | needs | gives |
| --- | --- | --- |
| the gradient of the embedding | a trained embedding | the tokens: only rows of tokens that occur have a gradient |
| that of the first layer behind it | more features than tokens in the batch; no noise | the tokens, mostly their places |

The second source is the span check of DAGER (Petrov et al., NeurIPS 2024): over a batch, the rows that a dense layer reads
span the row space of its gradient, so a token is in the batch if what the layer would read for it lies in that space. It
also works where the embedding is frozen, and shows places if what the layer reads depends on them. Under noise, the
likeliest tokens are chosen: the norm of each row of the embedding's gradient is weighed against the noise, and against how
frequent the token is in public texts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedcdp.attacks.objectives import predicted
from fedcdp.attacks.observe import Captured
from fedcdp.data.dataset import Dataset
from fedcdp.errors import DataError, ModelError
from fedcdp.files.tree import Inputs, each_tensor, first_tensor
from fedcdp.mechanism.randomness import numpy_generator
from fedcdp.models.networks import outputs_of

Source = Literal["embedding", "span"]

_NOTHING = 1e-6  # of the largest row: a smaller one has no gradient
_RANK = 1e-4  # of the largest singular value: smaller ones are rounding
_INSIDE = 1e-2  # largest share of what a layer reads for a token outside the row space
_AT_ONCE = 4096  # token places evaluated together
_MOST_VICTIMS = 64  # public batches that show how many tokens to expect, and how large their gradients are


@dataclass(frozen=True, eq=False)
class TokenGuesses:
    """Which tokens of the victims' sequences follow from the gradient. Padding is not counted."""

    source: Source
    """The gradient that was read."""
    precision: float
    """Share of the inferred tokens that occur in the victim's sequences."""
    recall: float
    """Share of the tokens in a victim's sequences that were inferred."""
    sets_exact: float
    """Share of victims whose tokens were all inferred, and no others."""
    sequences_exact: float | None
    """Share of single sequences that were recovered with every token at its place; None where places are not inferred."""
    baseline: tuple[float, float]
    """Precision and recall of the most frequent public tokens, as many as public texts have on average."""
    guesses: tuple[Tensor, ...] = field(repr=False)
    """The inferred tokens of each victim."""

    def summary(self) -> dict[str, Any]:
        """All figures."""
        return {
            "token_source": self.source, "token_precision": self.precision, "token_recall": self.recall,
            "token_sets_exact": self.sets_exact, "sequences_exact": self.sequences_exact,
            "token_baseline": {"precision": self.baseline[0], "recall": self.baseline[1]},
        }  # fmt: skip


def infer_tokens(captured: Captured, network: nn.Module, public: Dataset | None, seed: int = 0) -> TokenGuesses:
    """Infer the tokens of every victim, by the source that reveals more, and compare them with the truth."""
    name = token_input(captured.inputs)
    if public is None:
        raise DataError("public: tokens are inferred with the help of public texts, and there are none")
    known = _ids(public.inputs, name)
    vocabulary, padding = _vocabulary(network, known), _padding(known)
    usual = _usual(captured, public, name, vocabulary, padding, seed)
    truth = [
        _distinct(ids[present], padding) for ids, present in zip(_ids(captured.inputs, name), captured.present, strict=True)
    ]
    weight, source = _embedding(network, vocabulary), "embedding"
    guesses = None if weight is None else _from_embedding(captured, weight, public, usual, seed)
    guesses = None if guesses is None else [each[each != padding] for each in guesses]
    places = None
    if not captured.noisy and captured.steps == 1:
        spans = _span(captured, network, name, vocabulary, padding, guesses)
        if spans is not None and guesses is None:
            guesses, source = spans[0], "span"
        places = None if spans is None else spans[1]
    if guesses is None:
        raise ModelError(
            "attack: tokens needs a trained embedding or, behind a frozen one and without noise, a first dense layer that "
            "reads more features than a batch has tokens"
        )
    best = usual.shares.argsort(descending=True)[: usual.count]
    baseline = _compared([best] * len(truth), truth)
    scores = _compared(guesses, truth)
    exact = sum(set(one.tolist()) == set(other.tolist()) for one, other in zip(guesses, truth, strict=True)) / len(truth)
    whole = None
    if places is not None and captured.most == 1:
        right = [bool((place == ids[0]).all()) for place, ids in zip(places, _ids(captured.inputs, name), strict=True)]
        whole = sum(right) / len(right)
    return TokenGuesses(source, *scores, exact, whole, baseline, tuple(guesses))  # type: ignore[arg-type]


def token_input(inputs: Inputs) -> str | None:
    """The name of the input that holds token ids; None for a single tensor. A `DataError` if there is none."""
    if not isinstance(inputs, dict):
        if inputs.dtype != torch.int64:
            raise DataError("attack: tokens needs token ids (int64) as inputs")
        return None
    whole = [name for name, value in inputs.items() if value.dtype == torch.int64]
    if not whole:
        raise DataError("attack: tokens needs token ids (int64) among the inputs")
    return max(whole, key=lambda name: int(inputs[name].max()))


@dataclass(frozen=True)
class _Usual:
    """What public texts say about the tokens of a batch."""

    shares: Tensor
    """[vocabulary]: the share of public batches that hold a token."""
    count: int
    """How many distinct tokens a batch holds on average."""


def _usual(captured: Captured, public: Dataset, name: str | None, vocabulary: int, padding: int, seed: int) -> _Usual:
    drawn = _drawn(captured, public, seed)
    batches = [_distinct(_ids(public.inputs, name)[each], padding) for each in drawn]
    held = torch.zeros(vocabulary)
    for batch in batches:
        held[batch] += 1
    counts = torch.bincount(_ids(public.inputs, name).flatten(), minlength=vocabulary).float()
    if padding >= 0:
        counts[padding] = 0
    # Few batches tell rare tokens badly apart; the frequency of tokens does so.
    return _Usual(held / len(batches) + counts / counts.sum(), round(sum(map(len, batches)) / len(batches)))


def _drawn(captured: Captured, public: Dataset, seed: int) -> Tensor:
    """[batches, examples]: public texts in the place of the victims' own."""
    batches = min(len(captured), _MOST_VICTIMS)
    drawn = numpy_generator(seed, "token-texts").integers(len(public), size=(batches, captured.most))
    return torch.from_numpy(drawn)


def _ids(inputs: Inputs, name: str | None) -> Tensor:
    return first_tensor(inputs) if name is None or not isinstance(inputs, dict) else inputs[name]


def _padding(known: Tensor) -> int:
    """The token that ends most public sequences, if it does not begin any; −1 otherwise."""
    last = int(known[:, -1].mode().values)
    return last if not bool((known[:, 0] == last).any()) else -1


def _distinct(ids: Tensor, padding: int) -> Tensor:
    found: Tensor = ids.unique().cpu()
    return found[found != padding]


def _vocabulary(network: nn.Module, known: Tensor) -> int:
    tables = [module.num_embeddings for module in network.modules() if isinstance(module, nn.Embedding)]
    fitting = [size for size in tables if size > int(known.max())]
    if not fitting:
        raise ModelError("attack: tokens needs a network with an embedding of its token ids")
    return fitting[0]


def _embedding(network: nn.Module, vocabulary: int) -> str | None:
    """The name of the trained embedding's weight; None if it is frozen."""
    for name, module in network.named_modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings == vocabulary and module.weight.requires_grad:
            return f"{name}.weight".lstrip(".")
    return None


def _from_embedding(captured: Captured, weight: str, public: Dataset, usual: _Usual, seed: int) -> list[Tensor]:
    """The tokens whose rows of the embedding have a gradient; under noise, the likeliest ones."""
    squares = captured.seen[weight].double().square().sum(2).cpu()  # [victims, vocabulary]
    if not captured.noisy:
        return [(rows > _NOTHING**2 * rows.max()).nonzero()[:, 0] for rows in squares]
    size = captured.seen[weight].shape[2]
    drawn = _drawn(captured, public, seed)
    few = captured.take(torch.arange(len(drawn), device=captured.device))
    inputs = each_tensor(public.inputs, lambda value: value[drawn].to(captured.device))
    with torch.no_grad():
        shown = predicted(few, "method", inputs, public.targets[drawn].to(captured.device), few.present)[weight]
    rows = shown.double().square().sum(2).cpu()
    typical = float(rows[rows > 0].mean()) / size if bool((rows > 0).any()) else 0.0
    noise = captured.deviation.double().square().cpu()[:, None]
    # Rows are Gaussian with the noise's variance or, where the token occurs, with that of its gradient added.
    evidence = squares / 2 * (1 / noise - 1 / (noise + typical)) - size / 2 * (1 + typical / noise).log()
    prior = usual.shares.double().clamp(1e-6, 1 - 1e-6).logit()
    return [each.argsort(descending=True)[: usual.count] for each in evidence + prior]


def _span(
    captured: Captured, network: nn.Module, name: str | None, vocabulary: int, padding: int, known: list[Tensor] | None
) -> tuple[list[Tensor], list[Tensor] | None] | None:
    """The tokens of each victim, and which of them, or of those `known`, stand at each place; None if no layer tells.

    Places are None where the layer reads the same for a token wherever it stands.
    """
    found = _first_layer(captured, network)
    if found is None:
        return None
    module, weight = found
    read = _readings(captured, network, module, name, vocabulary)  # [vocabulary, positions, features]
    positions = read.shape[1]
    gradient = captured.seen[weight]
    if gradient.shape[2] == read.shape[2] * positions:  # the layer reads all places at once
        apart, placed = gradient.unflatten(2, (positions, -1)).transpose(1, 2), True
    elif gradient.shape[2] == read.shape[2]:
        apart = gradient[:, None].expand(-1, positions, -1, -1)
        placed = bool((read[:, :1] - read).abs().amax() > 1e-4 * read.abs().amax())
    else:
        return None
    tokens, places = [], []
    widths = [int(torch.linalg.matrix_rank(read[:, place], rtol=_RANK)) for place in range(positions if placed else 1)]
    sizes = read.double().norm(dim=2).clamp(min=1e-12)
    for victim, one in enumerate(apart.double().cpu()):
        outside = read.new_ones(vocabulary, positions, dtype=torch.float64)
        for place in range(positions if placed else 1):
            values, right = torch.linalg.svd(one[place], full_matrices=False)[1:]
            space = right[values > _RANK * values[0].clamp(min=1e-30)]
            if len(space) >= widths[place]:  # every token lies in it
                return None
            each = read[:, place].double()
            outside[:, place] = (each - (each @ space.T) @ space).norm(dim=1) / sizes[:, place]
        if known is not None:
            outside[~torch.isin(torch.arange(vocabulary), known[victim])] = 1
        inside = outside < _INSIDE
        held = inside.any(1).nonzero()[:, 0]
        tokens.append(held[held != padding])
        places.append(torch.where(inside.any(0), outside.argmin(0), padding))
    return tokens, places if placed else None


def _first_layer(captured: Captured, network: nn.Module) -> tuple[nn.Module, str] | None:
    """The first trained layer that reads features of tokens, in the order of evaluation, and its weight's name."""
    called: list[tuple[nn.Module, str]] = []
    handles = []
    for name, module in network.named_modules():
        own = "in_proj_weight" if isinstance(module, nn.MultiheadAttention) else "weight"
        if isinstance(module, nn.Linear | nn.MultiheadAttention) and f"{name}.{own}".lstrip(".") in captured.seen:
            full = f"{name}.{own}".lstrip(".")
            handles.append(module.register_forward_pre_hook(lambda each, _, full=full: called.append((each, full))))
    try:
        with torch.no_grad():
            outputs_of(network, each_tensor(captured.inputs, lambda value: value[0, :1]))
    finally:
        for handle in handles:
            handle.remove()
    return called[0] if called else None


def _readings(captured: Captured, network: nn.Module, module: nn.Module, name: str | None, vocabulary: int) -> Tensor:
    """What the layer reads for each token at each place [vocabulary, positions, features].

    A sequence that repeats one token shows this at all places: before the first layer, places do not mix.
    """
    kept: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, given: kept.append(given[0].detach()))
    positions = _ids(captured.inputs, name).shape[2]
    try:
        with torch.no_grad():
            for tokens in torch.arange(vocabulary, device=captured.device).split(max(1, _AT_ONCE // positions)):
                ids = tokens[:, None].expand(-1, positions)
                inputs = each_tensor(captured.inputs, lambda value: value[:1, 0].expand(len(ids), -1))  # noqa: B023
                given: Inputs = ids if name is None or not isinstance(inputs, dict) else inputs | {name: ids}
                outputs_of(network, given)
    finally:
        handle.remove()
    read = torch.cat(kept)
    return (read if read.dim() == 3 else read.unflatten(1, (positions, -1))).cpu()


def _compared(guesses: list[Tensor], truth: list[Tensor]) -> tuple[float, float]:
    """Precision and recall over all victims."""
    common = sum(len(set(one.tolist()) & set(other.tolist())) for one, other in zip(guesses, truth, strict=True))
    return common / max(1, sum(map(len, guesses))), common / max(1, sum(map(len, truth)))
