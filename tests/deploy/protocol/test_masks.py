"""Masks: they cancel to the bit if all members answer one context, and leave uniform bytes otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedcdp.deploy.protocol import masks, sum_context
from fedcdp.deploy.protocol.masks import Words, add_masks, key_stream, mask_key, sum_of
from fedcdp.deploy.protocol.sum_context import SumMember, context_of
from fedcdp.errors import RefusedError
from tests.support.small_task import task
from tools.sums.trial import Party, one_case

SUM = {"noise": "sum", "secure_aggregation": True, "local_steps": 1, "clip": "4"}
WORDS = 4096
PLAIN: dict[str, Any] = {"task": task(**SUM), "round_": 3, "attempt": 0, "bound": 4.0, "weights": bytes(32)}
CHANGES: dict[str, dict[str, Any]] = {
    "weights": {"weights": bytes(31) + b"\1"},
    "clip bound": {"bound": 4.0000000000000009},
    "round": {"round_": 4},
    "attempt": {"attempt": 1},
    "run": {"task": task(run="1" * 32, **SUM)},
    "colluders": {"task": task(**SUM | {"colluders": 1})},
}


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**63))
def test_the_masked_sum_equals_the_plain_sum_to_the_bit(seed: int) -> None:
    assert one_case(seed) is None


def parties(count: int = 3) -> list[Party]:
    source = np.random.default_rng(7)
    return [Party.new(source.bytes(49), X25519PrivateKey.from_private_bytes(source.bytes(32))) for _ in range(count)]


def sums_to_zero(change: Callable[[Party, list[Party]], tuple[bytes, list[SumMember]]]) -> tuple[bool, Words]:
    """Whether shares of zeros add up to zeros where the first party is shown something else; and what came instead."""
    them = parties()
    roster = [each.member for each in them]
    shown = {each.member: (context_of(**PLAIN, members=roster), roster) for each in them}
    shown[them[0].member] = change(them[0], them)
    zeros = np.zeros(WORDS, np.int64)
    total = sum_of(
        [add_masks(zeros, each.key, each.member, shown[each.member][1], shown[each.member][0]) for each in them], WORDS
    )
    return not total.any(), total.view(np.uint64)


def is_uniform(words: Words) -> bool:
    return bool(chisquare(np.bincount(words.view(np.uint8), minlength=256)).pvalue > 1e-6)


def shows(name: str) -> Callable[[Party, list[Party]], tuple[bytes, list[SumMember]]]:
    """What a server shows to one party, changed in one respect."""

    def change(_: Party, them: list[Party]) -> tuple[bytes, list[SumMember]]:
        roster = [each.member for each in them]
        if name == "roster":
            roster = [*roster, parties(4)[3].member]
        elif name == "key":
            roster = [*roster[:2], replace(roster[2], run_key=parties(4)[3].member.run_key)]
        return context_of(**PLAIN | CHANGES.get(name, {}), members=roster), roster

    return change


def test_the_same_context_for_all_gives_the_sum() -> None:
    assert sums_to_zero(shows("nothing"))[0]


@pytest.mark.parametrize("name", [*CHANGES, "roster", "key"])
def test_a_server_that_changes_anything_for_one_client_gets_uniform_bytes(name: str) -> None:
    zero, words = sums_to_zero(shows(name))
    assert not zero
    assert is_uniform(words)


def test_a_clip_bound_left_out_of_the_context_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sum_context, "_fraction", lambda _: b"")
    assert sums_to_zero(shows("clip bound"))[0]


def test_a_mask_key_without_the_context_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "joined", lambda _, *nodes: b"".join(nodes))
    assert sums_to_zero(shows("attempt"))[0]


def test_one_share_alone_is_uniform_and_a_key_is_used_once() -> None:
    one, other, *_ = parties()
    keys = {mask_key(one.key, one.member, other.member, bytes(31) + bytes([n])) for n in range(8)}
    assert len(keys) == 8
    assert mask_key(one.key, one.member, other.member, b"") == mask_key(other.key, other.member, one.member, b"")
    assert is_uniform(add_masks(np.zeros(WORDS, np.int64), one.key, one.member, [one.member, other.member], b""))


def test_a_missing_share_leaves_uniform_bytes() -> None:
    them = parties()
    roster = [each.member for each in them]
    came = [add_masks(np.zeros(WORDS, np.int64), each.key, each.member, roster, b"") for each in them[:2]]
    assert is_uniform(sum_of(came, WORDS).view(np.uint64))


def test_the_key_stream_is_chacha20() -> None:
    """RFC 8439, appendix A.1, test vector 1: key, nonce and counter are zero."""
    expected = bytes.fromhex("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")
    assert key_stream(bytes(32), 4).astype("<u8").tobytes() == expected


def test_a_key_with_a_zero_secret_is_refused() -> None:
    one = parties()[0]
    with pytest.raises(RefusedError, match="its shared secret is zero"):
        mask_key(one.key, one.member, SumMember(bytes(49), bytes(32)), b"")


def test_fields_of_different_lengths_never_look_alike() -> None:
    assert sum_context.joined(b"a", b"bc") != sum_context.joined(b"ab", b"c")
    assert sum_context.joined(b"") != sum_context.joined()


def test_the_order_of_the_roster_does_not_matter() -> None:
    roster = [each.member for each in parties()]
    assert context_of(**PLAIN, members=roster) == context_of(**PLAIN, members=roster[::-1])
