"""Run keys: signed for one task by one node, kept in the state directory, deleted when the run ends."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedcdp.deploy.protocol.known_nodes import KnownNodes, fingerprint, read_identity
from fedcdp.deploy.protocol.sum_keys import (
    SignedKey,
    forget_keys,
    own_key,
    sign_key,
    store_peers,
    stored_key,
    stored_peers,
)
from fedcdp.errors import PolicyError, RunError, WireError
from tests.support.small_task import task
from tests.support.sum_nodes import SumFolder, listed, node_key, node_pair

SUM = {"noise": "sum", "secure_aggregation": True, "local_steps": 1}
TASK, OTHER = task(**SUM), task(run="1" * 32, **SUM)


@pytest.fixture
def signed(tmp_path: Path) -> SignedKey:
    folder = SumFolder.write(tmp_path, 0)
    return sign_key(read_identity(folder.config["identity"]), TASK, X25519PrivateKey.generate())


def test_a_signed_key_holds_for_its_task_and_node_only(signed: SignedKey) -> None:
    member = signed.member
    assert member.node == node_key(0)
    assert signed.holds(TASK)
    assert SignedKey.from_bytes(signed.to_bytes()) == signed
    wrong = {
        "another run": signed.holds(OTHER),
        "another node": SignedKey(replace(member, node=node_key(1)), signed.signature).holds(TASK),
        "another key": SignedKey(replace(member, run_key=bytes(32)), signed.signature).holds(TASK),
        "no signature": SignedKey(member, b"\0").holds(TASK),
        "no point": SignedKey(replace(member, node=b"\7" * 49), signed.signature).holds(TASK),
    }
    assert not [name for name, held in wrong.items() if held]


def test_a_signature_for_another_purpose_does_not_hold(signed: SignedKey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedcdp.deploy.protocol.sum_keys._PURPOSE", b"fedcdp-sum-1 other")
    assert not signed.holds(TASK)


@pytest.mark.parametrize("content", [b"", b"\0" * 81, b"\0" * 300, "text", None])
def test_what_is_no_signed_key_is_refused(content: object) -> None:
    with pytest.raises(WireError, match="81 bytes and a signature"):
        SignedKey.from_bytes(content)


def test_the_key_of_a_task_is_stored_once_and_secret(tmp_path: Path) -> None:
    one = own_key(tmp_path, TASK)
    assert own_key(tmp_path, TASK).private_bytes_raw() == one.private_bytes_raw()
    assert own_key(tmp_path, OTHER).private_bytes_raw() != one.private_bytes_raw()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {0o600}


def test_keys_are_deleted_for_one_run_or_for_all(tmp_path: Path, signed: SignedKey) -> None:
    for each in (TASK, OTHER):
        own_key(tmp_path, each)
        store_peers(tmp_path, each, [signed])
    forget_keys(tmp_path, TASK.digest())
    assert stored_key(tmp_path, TASK) is None
    assert stored_peers(tmp_path, TASK) == {}
    assert stored_key(tmp_path, OTHER) is not None
    forget_keys(tmp_path)
    assert stored_key(tmp_path, OTHER) is None


def test_peers_are_stored_for_one_task(tmp_path: Path, signed: SignedKey) -> None:
    store_peers(tmp_path, TASK, [signed])
    assert stored_peers(tmp_path, TASK) == {signed.member.node: signed.member}
    assert stored_peers(tmp_path, OTHER) == {}


@pytest.mark.parametrize("ending", ["key", "peers"])
def test_damaged_files_are_named(ending: str, tmp_path: Path) -> None:
    (tmp_path / f"sum-{TASK.digest()}.{ending}").write_bytes(b"xyz")
    with pytest.raises(RunError, match=f"{ending} is damaged; delete it"):
        (stored_key if ending == "key" else stored_peers)(tmp_path, TASK)


# roster.toml ---------------------------------------------------------------------------------------------------------


def test_the_list_names_nodes_by_their_keys(tmp_path: Path) -> None:
    path = tmp_path / "roster.toml"
    path.write_text(listed([0, 1], made_by="operator"))
    known = KnownNodes.read(path)
    assert {each.name: each.made_by for each in known.nodes.values()} == {"n0": "operator", "n1": "operator"}
    assert known.nodes.keys() == {node_key(0), node_key(1)}


def test_a_fingerprint_is_that_of_ssh_keygen(tmp_path: Path) -> None:
    import shutil
    import subprocess

    if shutil.which("ssh-keygen") is None:
        pytest.skip("ssh-keygen is not installed")
    (tmp_path / "node.pub").write_bytes(node_pair(0).public)
    shown = subprocess.run(["ssh-keygen", "-lf", tmp_path / "node.pub"], capture_output=True, text=True, check=True)
    assert fingerprint(node_key(0)) in shown.stdout


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("node = 3", r"must hold tables \[\[node\]\]"),
        ("[[node]]\nname = 'a'", "node 1: it must have a name and a key"),
        ("[[node]]\nname = 'a'\nkey = 'ssh-rsa AAAA'", "key: it is not a public key"),
        ("[[node]]\nname = ''\nkey = 'x'", "name: it must be a text"),
        ("[[node]]\nname = 'a'\nkey = 3", "key: it must be a text"),
        ("[[other]]\nname = 'a'", "nothing else"),
        ("]", "is not a TOML file"),
    ],
)
def test_a_list_that_cannot_be_used_says_why(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "roster.toml"
    path.write_text(text)
    with pytest.raises(PolicyError, match=sentence):
        KnownNodes.read(path)


def test_a_key_twice_or_an_unknown_maker_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "roster.toml"
    path.write_text(listed([0, 0]))
    with pytest.raises(PolicyError, match="node 2: its key is that of n0"):
        KnownNodes.read(path)
    path.write_text(listed([0], made_by="nobody"))
    with pytest.raises(PolicyError, match="made_by: nobody is not one of owner, operator"):
        KnownNodes.read(path)


@pytest.mark.parametrize("content", [b"", b"-----BEGIN OPENSSH PRIVATE KEY-----\n"])
def test_an_identity_that_is_no_key_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "node.key").write_bytes(content)
    with pytest.raises(PolicyError, match=r"identity: .* is not a private key"):
        read_identity(tmp_path / "node.key")
    with pytest.raises(PolicyError, match=r"identity: .* cannot be read"):
        read_identity(tmp_path / "none.key")
