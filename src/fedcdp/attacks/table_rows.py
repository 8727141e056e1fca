"""Rows of a table as free values: a softmax over the categories of each column (TabLeak; Vero et al., ICML 2023).

A number is one free value, kept within the range of public rows. A category has one free value for each of its choices, also
for "missing" where its inputs may all be 0; their softmax gives its inputs. `RowSpace` maps free values to rows and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from fedcdp.data.input_columns import InputColumns

_RARE = 1e-4  # added to the share of each choice, so none is impossible
_SURE = 6.0  # free value of a row's own choice above those of the others
_SPREAD = 0.5  # standard deviation of the first free values
_BEYOND = 0.05  # of a number's public range: how far it may leave it


@dataclass(frozen=True)
class RowSpace:
    """The free values of rows, and what public rows say about them."""

    columns: InputColumns
    places: tuple[slice, ...]
    """The free values of each column."""
    usual: Tensor
    """[free values]: the logarithm of the public share of each choice; 0 for numbers."""
    low: Tensor
    high: Tensor
    """[free values]: the range of numbers; ∓∞ for categories."""
    mean: Tensor
    deviation: Tensor
    """[columns]: of public numbers; 0 and 1 for categories."""

    @staticmethod
    def of(columns: InputColumns, public: Tensor) -> RowSpace:
        """The space of rows like the public ones [N, n]."""
        starts = list(accumulate((column.choices() for column in columns), initial=0))
        places = tuple(slice(first, last) for first, last in pairwise(starts))
        usual, low, high = (public.new_full((starts[-1],), value) for value in (0.0, -torch.inf, torch.inf))
        mean, deviation = public.new_zeros(len(columns)), public.new_ones(len(columns))
        for number, (column, place) in enumerate(zip(columns, places, strict=True)):
            if not column.is_number:
                chosen = torch.bincount(decode(public, (column,))[:, 0].long(), minlength=column.choices())
                usual[place] = (chosen / len(public) + _RARE).log().to(public)
                continue
            values = public[:, column.start]
            beyond = _BEYOND * (values.max() - values.min())
            low[place], high[place] = values.min() - beyond, values.max() + beyond
            mean[number], deviation[number] = values.mean(), values.std(correction=0).clamp(min=1e-6)
        return RowSpace(columns, places, usual, low, high, mean, deviation)

    @property
    def size(self) -> int:
        """How many free values a row has."""
        return len(self.usual)

    def rows(self, free: Tensor) -> Tensor:
        """The rows [..., n] behind free values [..., size], differentiable."""
        parts = []
        for column, place in zip(self.columns, self.places, strict=True):
            if column.is_number:
                parts.append(free[..., place])
            else:
                parts.append(free[..., place].softmax(-1)[..., : column.width])
        return torch.cat(parts, dim=-1)

    def surprise(self, free: Tensor) -> Tensor:
        """[...]: −log of the density of rows under public marginals: categories by their share, numbers as Gaussians."""
        total = free.new_zeros(free.shape[:-1])
        for number, (column, place) in enumerate(zip(self.columns, self.places, strict=True)):
            if column.is_number:
                total = total + ((free[..., place] - self.mean[number]) / self.deviation[number]).square().sum(-1) / 2
            else:
                total = total - (free[..., place].softmax(-1) * self.usual[place]).sum(-1)
        return total

    def entropy(self, free: Tensor) -> Tensor:
        """[...]: how undecided the categories of rows are, in nats."""
        total = free.new_zeros(free.shape[:-1])
        for column, place in zip(self.columns, self.places, strict=True):
            if not column.is_number:
                logs = free[..., place].log_softmax(-1)
                total = total - (logs.exp() * logs).sum(-1)
        return total

    def begin(self, public: Tensor, lead: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """First free values [*lead, size]: categories near their public shares, each number that of a random public row."""
        free = self.usual.cpu() + _SPREAD * torch.randn(*lead, self.size, generator=generator)
        for column, place in zip(self.columns, self.places, strict=True):
            if column.is_number:
                drawn = torch.randint(len(public), lead, generator=generator)
                free[..., place] = public.cpu()[drawn, column.start][..., None]
        return free.to(self.usual)

    def free_of(self, rows: Tensor) -> Tensor:
        """Free values of given rows [..., n]."""
        cells = decode(rows, self.columns)
        free = rows.new_zeros(*rows.shape[:-1], self.size)
        for number, (column, place) in enumerate(zip(self.columns, self.places, strict=True)):
            if column.is_number:
                free[..., place] = cells[..., number, None]
            else:
                own = torch.nn.functional.one_hot(cells[..., number].long(), column.choices())
                free[..., place] = _SURE * own.to(rows)
        return free

    def kept(self, free: Tensor) -> Tensor:
        """The nearest free values whose numbers are in range."""
        return free.clamp(self.low, self.high)


def decode(rows: Tensor, columns: InputColumns) -> Tensor:
    """The cells [..., columns] of rows [..., n]: numbers as they are, categories as the number of the likeliest choice."""
    cells = []
    for column in columns:
        inputs = rows[..., column.inputs]
        if column.is_number:
            cells.append(inputs[..., 0])
            continue
        if column.may_be_empty:
            inputs = torch.cat([inputs, 1 - inputs.sum(-1, keepdim=True)], dim=-1)
        cells.append(inputs.argmax(-1).to(rows))
    return torch.stack(cells, dim=-1)


def encode(cells: Tensor, columns: InputColumns) -> Tensor:
    """The rows [..., n] of cells [..., columns]."""
    parts = []
    for number, column in enumerate(columns):
        if column.is_number:
            parts.append(cells[..., number, None])
        else:
            own = torch.nn.functional.one_hot(cells[..., number].long(), column.choices())
            parts.append(own[..., : column.width].to(cells))
    return torch.cat(parts, dim=-1)
