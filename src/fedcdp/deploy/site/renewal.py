"""Renewal of certificates that the deployment's own authority signed.

The server's certificate is renewed without a change at the nodes. The authority's own one is renewed in two steps: first a
new root stands beside the old one in every `ca.pem`, and once all nodes have it, the server's certificate is renewed under
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fedcdp.deploy.site.certificates import Authority, require_cryptography
from fedcdp.deploy.site.directory import Site
from fedcdp.deploy.site.preflight import certificates_in, unexpired
from fedcdp.errors import DeploymentError
from fedcdp.files.disk import write_atomically

_SECRET, _PLAIN = 0o600, 0o644


@dataclass(frozen=True)
class Renewed:
    """What was renewed."""

    paths: tuple[Path, ...]
    until: datetime
    """When it expires."""


def renew_server(site: Site) -> Renewed:
    """Sign a new certificate and key for the server, for the names of the current certificate."""
    authority, current = _authority(site), certificates_in(site.server / "server.pem")[0]
    pair = authority.sign_server(_names(current, site))
    try:
        # A server that starts between the two refuses a certificate that does not fit its key, and can be started again.
        write_atomically(site.server / "server.key", pair.private, _SECRET)
        write_atomically(site.server / "server.pem", pair.public, _PLAIN)
    except OSError as error:
        raise DeploymentError(f"{error.filename or site.server} cannot be written: {error.strerror}") from error
    (renewed,) = certificates_in(site.server / "server.pem")
    return Renewed((site.server / "server.pem",), renewed.not_valid_after_utc)


def renew_authority(site: Site) -> Renewed:
    """Make a new authority, and put its root before the valid old ones into every `ca.pem` here."""
    _require_authority(site)
    old, new = unexpired(certificates_in(site.authority / "ca.pem")), Authority.new()
    content = new.pair.public + b"".join(_pem(each) for each in old)
    paths = (site.authority / "ca.pem", *sorted(site.path.glob("node-*/ca.pem")))
    try:
        for path in paths:
            write_atomically(path, content, _PLAIN)
        write_atomically(site.authority / "ca.key", new.pair.private, _SECRET)
    except OSError as error:
        raise DeploymentError(f"{error.filename or site.authority} cannot be written: {error.strerror}") from error
    return Renewed(paths, certificates_in(paths[0])[0].not_valid_after_utc)


def _require_authority(site: Site) -> None:
    if not (site.authority / "ca.key").is_file():
        raise DeploymentError(
            f"{site.authority / 'ca.key'} does not exist: let the authority that issued server/server.pem renew it, and "
            "replace server/server.pem and server/server.key"
        )


def _authority(site: Site) -> Authority:
    _require_authority(site)
    require_cryptography()
    try:
        return Authority.read((site.authority / "ca.key").read_bytes(), certificates_in(site.authority / "ca.pem"))
    except OSError as error:
        raise DeploymentError(f"{site.authority / 'ca.key'} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DeploymentError(f"{site.authority / 'ca.key'}: {error}") from None


def _names(certificate: Any, site: Site) -> list[str]:
    """The names and addresses of a certificate."""
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return [site.require().host, "localhost", "127.0.0.1"]
    return [str(each.value) for each in names]


def _pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    content: bytes = certificate.public_bytes(Encoding.PEM)
    return content
