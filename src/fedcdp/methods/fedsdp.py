"""Fed-SDP: client differential privacy, at the server or at the client (Wei et al., ICDCS 2021, Algorithm 1).

The printed algorithm has 1/K_t twice, and noise for each client inside the server's sum; the two placements below follow
the paper's text.
"""

from __future__ import annotations

import torch

from fedcdp.files.tree import Tree
from fedcdp.mechanism.clipping import clip
from fedcdp.mechanism.noise import noised
from fedcdp.mechanism.secure_sum import from_integers
from fedcdp.methods.base import Moment, noised_share
from fedcdp.methods.nonprivate import NonPrivate


class FedSDP(NonPrivate):
    """Local training is not private; a client's whole update is clipped layer by layer and noised.

    Guarantees: the sum of the updates has L2 sensitivity C·√M (C if clipped flat) when one client's update is zeroed out,
    and carries N(0, (σC)²) on every coordinate: once if the server adds it, once for each client if the clients do. With
    noise at the server, the server and anyone who reads the network traffic see raw updates. Gradients inside local
    training are always raw.

    Under `sum` noise the clients send their clipped updates in whole numbers with a share of the noise each
    (`base.noised_share`); the shares of all honest clients together are the noise of the guarantee.

    If the bound follows a quantile, each client's indicator (sensitivity ½) is counted and noised in the same place as its
    update (`quantile`).
    """

    def sanitise_update(self, update: Tree, at: Moment) -> Tree:
        """With noise at the client, clip and noise the update; nothing raw leaves the client."""
        if at.plan.noise_at == "server":
            return update
        if at.plan.sums:
            return noised_share(_clip_clients(update, at), at)
        noise = at.noise.for_update(at.round, at.clients, at.noise_scale)
        return noised(_clip_clients(update, at), noise)  # lines 8-15

    def admit(self, update: Tree, at: Moment) -> Tree:
        """With noise at the server, clip each raw update that it received."""
        return _clip_clients(update, at) if at.plan.noise_at == "server" else update  # lines 8-14

    def sanitise_sum(self, total: Tree, at: Moment) -> Tree:
        """With noise at the server, noise the sum once, regardless of which clients took part; under `sum`, decode it."""
        if at.plan.sums:
            return from_integers(total, at.clip_bound)
        if at.plan.noise_at == "client":
            return total
        noise = at.noise.for_server(at.round, at.clients.device, at.noise_scale)
        return noised(total, noise)  # line 15


def _clip_clients(update: Tree, at: Moment) -> Tree:
    every_client = torch.ones(len(at.clients), dtype=torch.bool, device=at.clients.device)
    return clip(update, at.groups, at.clip_bound, present=every_client).values
