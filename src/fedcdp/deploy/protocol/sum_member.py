"""A client's part of a secure sum: its identity, the keys of the others, and the checks before it sends its share.

Who must not know what: the server, together with the colluders, must learn nothing but the sum of the honest members. The
client's ledger counts the cost of that sum. So a client answers an attempt only if it has checked, itself, all that this
cost depends on; then it writes the attempt with its context down, and only then does it compute its share.

| the client refuses | because |
| --- | --- |
| a roster without itself, with a node twice, or larger than the task's | its noise share is for the roster's size |
| a member that is not on its list (`known_nodes`) | the server may have invented the node |
| a member whose key the operator made, unless its policy trusts them | the operator can act as that node |
| a member without a signed run key for this task | the server could read the masks |
| too few honest members: n − t below its policy's `smallest_honest` | the others' noise is part of its protection |
| more attempts than the task has; a round and attempt not above the last in its ledger | each costs a participation |
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from fedcdp.deploy.protocol.client_ledger import Summed
from fedcdp.deploy.protocol.key_rotation import (
    MOST_ROTATIONS,
    KeyRotation,
    follow,
    own_rotations,
    store_rotations,
    stored_rotations,
)
from fedcdp.deploy.protocol.known_nodes import KnownNodes, node_key_of, read_identity
from fedcdp.deploy.protocol.local_round import LocalTraining, Round
from fedcdp.deploy.protocol.masks import Words, add_masks
from fedcdp.deploy.protocol.policy import ClientPolicy
from fedcdp.deploy.protocol.sum_context import SumMember, context_of
from fedcdp.deploy.protocol.sum_keys import SignedKey, own_key, sign_key, store_peers, stored_key, stored_peers
from fedcdp.deploy.protocol.task import Task
from fedcdp.errors import DefectError, PlanError, RefusedError
from fedcdp.files.tree import Layout, Tree
from fedcdp.mechanism.secure_sum import check_capacity

_LOG = logging.getLogger("flwr.fedcdp")


@dataclass(frozen=True)
class CheckedAttempt:
    """An attempt at a sum that this client has checked."""

    me: SumMember
    members: Sequence[SumMember]
    key: X25519PrivateKey
    context: bytes

    @property
    def summed(self) -> Summed:
        """What the ledger keeps of it."""
        return Summed(len(self.members), self.context.hex())

    def masked_share(self, training: LocalTraining, weights: Tree, asked: Round, client: int) -> Words:
        """What leaves the client, computed after the ledger has the attempt: its share, with fresh noise, under masks."""
        share = share_of(training, weights, asked, len(self.members), client)
        return add_masks(share, self.key, self.me, self.members, self.context)


def share_of(training: LocalTraining, weights: Tree, asked: Round, members: int, client: int) -> NDArray[np.int64]:
    """The whole numbers [D] that a client brings to the sum of a roster of so many members, its noise share included."""
    sent = training.take_part(weights, asked, client, members)
    flat = training.engine.layout.flatten({name: value[0] for name, value in sent.update.items()}, lead=0)
    if flat.dtype != torch.int64:
        raise DefectError("a share of a sum must be in whole numbers")
    return flat.cpu().numpy()


class SumClient:
    """A client of secure sums: its node key, the nodes that it knows, and the run keys in its state directory."""

    def __init__(
        self,
        identity: EllipticCurvePrivateKey,
        known: KnownNodes,
        state: Path,
        policy: ClientPolicy,
        key_file: Path | None = None,
    ) -> None:
        self._identity, self._listed, self._state, self._policy = identity, known, state, policy
        self._key_file = key_file
        self._known = known
        if policy.accept_rotated_keys:
            self._known = follow(known, stored_rotations(state))
        self.node = node_key_of(identity.public_key())

    @staticmethod
    def of(config: Any, state: Path, policy: ClientPolicy) -> SumClient:
        """The client of a node configuration: `identity` is the file of its node key, `roster` that of its list."""
        for name, what in (("identity", "its node key"), ("roster", "the list of nodes that it knows")):
            if not isinstance(config.get(name), str):
                raise RefusedError(f"a secure sum needs {what}: {name} is missing in the node configuration")
        key_file = Path(config["identity"])
        return SumClient(read_identity(key_file), KnownNodes.read(config["roster"]), state, policy, key_file)

    def own_rotations(self) -> list[KeyRotation]:
        """The planned rotations of this node's own key."""
        return [] if self._key_file is None else own_rotations(self._key_file)

    def signed_key(self, task: Task, layout: Layout, records: int) -> SignedKey:
        """This client's run key for a task that it accepts, signed.

        Raises:
            RefusedError: This node is not on its own list, or the exact noise does not cover so many records or weights.
        """
        self._check_listed(self.node)
        groups = len(layout.groups(task.plan.clip_mode))
        try:
            check_capacity(task.plan, groups=groups, size=layout.size, most_records=records)
        except PlanError as error:
            raise RefusedError(str(error)) from None
        return sign_key(self._identity, task, own_key(self._state, task))

    def keep_keys(self, task: Task, keys: Iterable[SignedKey], rotations: Sequence[KeyRotation] = ()) -> list[bytes]:
        """Keep the others' run keys that are signed by nodes on the list; return these nodes.

        Rotations of keys on the list are kept and followed, if the policy accepts them.
        """
        if self._policy.accept_rotated_keys:
            self._follow(rotations)
        kept = dict[bytes, SignedKey]()
        for each in keys:
            node = each.member.node
            if node not in self._known.nodes:
                _LOG.warning("a run key of a node that is not on the list is left out: %s", self._known.title(node))
            elif not each.holds(task):
                _LOG.warning("the run key of %s is left out: its signature does not hold", self._known.title(node))
            else:
                kept[node] = each
        store_peers(self._state, task, kept.values())
        return list(kept)

    def _follow(self, rotations: Sequence[KeyRotation]) -> None:
        """Keep the rotations that start, over others perhaps, at a key on the owner's list, and follow them."""
        offered = dict.fromkeys([*stored_rotations(self._state), *(each for each in rotations if each.holds())])
        reached = set(self._listed.nodes)
        while more := {each.new for each in offered if each.old in reached} - reached:
            reached |= more
        useful = [each for each in offered if each.old in reached][: 10 * MOST_ROTATIONS]
        store_rotations(self._state, useful)
        self._known = follow(self._listed, useful)

    def check_attempt(self, task: Task, asked: Round, roster: Sequence[bytes], weights: bytes) -> CheckedAttempt:
        """Check a roster, and compute the context of the attempt; `weights` is their hash (`weights_hash`).

        Raises:
            RefusedError: Anything in the table above, except for what the ledger checks.
        """
        plan, policy = task.plan, self._policy
        if self.node not in roster:
            raise RefusedError("the roster does not have this node", kind="roster")
        if len(set(roster)) != len(roster):
            raise RefusedError("the roster has a node twice", kind="roster")
        if len(roster) > plan.per_round:
            raise RefusedError(
                f"the roster has {len(roster)} members; the task has {plan.per_round} in a round", kind="roster"
            )
        if len(roster) < task.smallest_cohort:
            raise RefusedError(
                f"the roster has {len(roster)} members; the task promises {task.smallest_cohort} or more", kind="roster"
            )
        if len(roster) < 2 or len(roster) - plan.colluders < policy.smallest_honest:
            raise RefusedError(policy.too_few_honest(len(roster), plan.colluders), kind="roster")
        for node in roster:
            self._check_listed(node)
        if (key := stored_key(self._state, task)) is None:
            raise RefusedError("this client has no run key for the task any more", kind="roster")
        me = SumMember(self.node, key.public_key().public_bytes_raw())
        peers = stored_peers(self._state, task) | {self.node: me}
        if missing := [node for node in roster if node not in peers]:
            raise RefusedError(f"there is no signed run key of the member {missing[0][:8].hex()}…", kind="roster")
        members = sorted(peers[node] for node in roster)
        bound = plan.clip_at(asked.number, asked.clip)
        context = context_of(
            task=task, round_=asked.number, attempt=asked.attempt, bound=bound, weights=weights, members=members
        )
        return CheckedAttempt(me, members, key, context)

    def _check_listed(self, node: bytes) -> None:
        if (known := self._known.nodes.get(node)) is None:
            whose = "this node" if node == self.node else f"the member {node[:8].hex()}…"
            raise RefusedError(f"{whose} is not on the list of known nodes", kind="roster")
        if known.made_by == "operator" and not self._policy.trust_operator_keys:
            whose = "of this node" if node == self.node else "of a member"
            raise RefusedError(
                f"the key {whose} was made by the operator, who may have kept it: make a new one on its own machine with "
                "fedcdp deploy rekey, or for tests set trust_operator_keys",
                kind="roster",
            )
