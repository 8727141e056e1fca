"""The test authority signs what a TLS client believes, and nothing more."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import threading
from pathlib import Path

import pytest

x509 = pytest.importorskip("cryptography.x509")

from cryptography.hazmat.primitives import serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402

from fedcdp.deploy.site.certificates import Authority, new_node_key  # noqa: E402


def _shake_hands(tmp_path: Path, signed_by: Authority, trusted: Authority, called: str) -> str | None:
    """Connect by TLS to a server whose certificate one authority signed, trusting another; what went wrong, if anything."""
    pair = signed_by.sign_server(["fl.example.org", "localhost", "127.0.0.1"])
    (tmp_path / "key").write_bytes(pair.private)
    (tmp_path / "pem").write_bytes(pair.public)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(tmp_path / "pem", tmp_path / "key")
    asking = ssl.create_default_context(cadata=trusted.pair.public.decode())
    here, there = socket.socketpair()

    def serve() -> None:
        try:
            serving.wrap_socket(there, server_side=True).close()
        except (ssl.SSLError, OSError):
            there.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        asking.wrap_socket(here, server_hostname=called).close()
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    finally:
        here.close()
        thread.join(10)
    return None


@pytest.mark.parametrize("called", ["fl.example.org", "localhost", "127.0.0.1"])
def test_the_server_is_believed_under_each_of_its_names(tmp_path: Path, called: str) -> None:
    authority = Authority.new()
    assert _shake_hands(tmp_path, authority, authority, called) is None


def test_another_name_is_not_believed(tmp_path: Path) -> None:
    authority = Authority.new()
    assert "mismatch" in str(_shake_hands(tmp_path, authority, authority, "other.example.org"))


def test_another_authority_of_the_same_name_is_not_believed(tmp_path: Path) -> None:
    assert _shake_hands(tmp_path, Authority.new(), Authority.new(), "localhost") is not None


def test_a_server_certificate_is_no_authority_and_ends_within_a_year_or_so() -> None:
    certificate = x509.load_pem_x509_certificate(Authority.new().sign_server(["127.0.0.1"]).public)
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names.get_values_for_type(x509.IPAddress)) == [ipaddress.ip_address("127.0.0.1")]
    assert certificate.not_valid_after_utc - certificate.not_valid_before_utc < datetime.timedelta(days=398)


def test_a_node_key_is_what_flower_wants_and_new_each_time() -> None:
    pair = new_node_key()
    private = serialization.load_ssh_private_key(pair.private, password=None)
    public = serialization.load_ssh_public_key(pair.public)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert isinstance(private.curve, ec.SECP384R1)
    assert public == private.public_key()
    assert pair.public.startswith(b"ecdsa-sha2-nistp384 ")
    assert new_node_key().public != pair.public
