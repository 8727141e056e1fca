"""Compression: a client sends only the larger entries of its update.

An update that is already noised may be pruned freely (post-processing). Pruning alone protects nothing: which entries are
sent, and their values, are functions of the data.
"""

from __future__ import annotations

import torch

from fedcdp.files.tree import Layout, Tree


def keep_largest(update: Tree, layout: Layout, fraction: float) -> Tree:
    """Set all but the largest `fraction` of each client's entries [clients, ...] to zero, ranked over the whole update.

    At least one entry is kept; among equal magnitudes, earlier coordinates win.
    """
    if fraction >= 1:
        return update
    flat = layout.flatten(update, lead=1)
    kept = max(1, round(fraction * flat.shape[-1]))
    order = flat.abs().argsort(dim=-1, descending=True, stable=True)[:, :kept]
    sent = torch.zeros_like(flat, dtype=torch.bool).scatter_(-1, order, True)
    return layout.unflatten(torch.where(sent, flat, 0.0))
