"""Certificates and keys of a test authority: enough for TLS and node authentication, and easy to replace.

A server authenticates with a certificate that the authority signed; a node with a key whose public half is registered at
the server. None of them is a secret of the training, but anyone with a node's key can act as that node.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedcdp.errors import DeploymentError
from fedcdp.files.installation import install_command

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec


VALID_DAYS = 365
_CLOCKS_DIFFER = datetime.timedelta(hours=1)  # a new certificate must already be valid on a machine whose clock is late


@dataclass(frozen=True)
class Pair:
    """A private key and its public counterpart, both as text."""

    private: bytes
    public: bytes


def require_cryptography() -> None:
    """Raise an error with the install command if the package is missing."""
    try:
        import cryptography  # noqa: F401
    except ModuleNotFoundError:
        raise DeploymentError(
            f"certificates and keys need cryptography; install it with {install_command('flower')}"
        ) from None


class Authority:
    """A certificate authority that only signs server certificates; its key is needed for nothing else."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key, self._certificate = key, certificate

    @classmethod
    def new(cls, name: str = "fedcdp test authority") -> Authority:
        """A new authority with its own key."""
        require_cryptography()
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        key = _new_key()
        itself = _name(name)
        certificate = _signed(
            _certificate(itself, itself, key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(sign_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False),
            key,
        )
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return cls(key, certificate)

    @staticmethod
    def read(key: bytes, certificates: Sequence[x509.Certificate]) -> Authority:
        """The authority of a key, with its certificate among several; raises `ValueError` if there is none."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        loaded = serialization.load_pem_private_key(key, password=None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise ValueError("it is not an EC key")
        own = next((each for each in certificates if each.public_key() == loaded.public_key()), None)
        if own is None:
            raise ValueError("it is not the key of a certificate in ca.pem")
        return Authority(loaded, own)

    @property
    def pair(self) -> Pair:
        """The authority's key and its certificate, which every party needs."""
        return Pair(_pem(self._key), _pem_of(self._certificate))

    def sign_server(self, hosts: Iterable[str]) -> Pair:
        """A key and a certificate for a server reached under any of these names or addresses."""
        from cryptography import x509
        from cryptography.x509.oid import ExtendedKeyUsageOID

        names = list(dict.fromkeys(hosts))
        key = _new_key()
        certificate = _signed(
            _certificate(_name(names[0]), self._certificate.subject, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(sign_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([_general_name(each) for each in names]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            ),
            self._key,
        )  # fmt: skip
        return Pair(_pem(key), _pem_of(certificate))


def new_node_key() -> Pair:
    """A node's key: EC on SECP384R1, both halves in OpenSSH format, as Flower requires."""
    require_cryptography()
    from cryptography.hazmat.primitives import serialization

    key = _new_key()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return Pair(private, public + b"\n")


def _new_key() -> ec.EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:  # fmt: skip
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
    )


def _signed(certificate: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography.hazmat.primitives import hashes

    return certificate.sign(key, hashes.SHA384())


def _name(name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])  # the longest allowed common name


def _general_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _pem_of(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return certificate.public_bytes(serialization.Encoding.PEM)
