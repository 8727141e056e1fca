"""Checks before a node or a server starts: what would fail later, and without a reason.

| check | otherwise |
| --- | --- |
| Flower's release is one that this package supports | the processes do not understand each other |
| certificates are valid, and for how long | connections fail from one day to the next |
| the policy can be read, and the ledger is not older than its mark (`ledger_mark`) | the client refuses every message |
| the clock agrees with the server's | the server refuses the node's signature, and the node ends without a reason |
"""

from __future__ import annotations

import datetime
import email.utils
import http.client
import importlib.metadata
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedcdp.deploy.site.certificates import require_cryptography
from fedcdp.deploy.site.client_files import ClientFiles
from fedcdp.deploy.site.directory import NodePlace, Site
from fedcdp.errors import DeploymentError
from fedcdp.files.untrusted import MOST_SETTINGS, read_bounded

WARNING_DAYS = 30
FLOWER = ((1, 41), (1, 42))
"""Releases of Flower that are supported: from the first, and below the second."""
MOST_AHEAD, MOST_BEHIND = 5.0, 300.0
"""Seconds by which a node's clock may differ: Flower refuses signatures of the future, and those older than 5 minutes."""
_ROUNDED = 1.0  # an HTTP date has whole seconds
_CONNECT_SECONDS = 10.0


@dataclass
class Checked:
    """What the checks found: warnings for people, and when certificates expire, in Unix time by file name."""

    warnings: list[str] = field(default_factory=list)
    expiries: dict[str, float] = field(default_factory=dict)


def check_server(site: Site) -> Checked:
    """Check a server's folder."""
    site.require()
    checked = _common()
    _check_certificates(checked, (site.server / "server.pem", site.authority / "ca.pem"), "fedcdp deploy renew")
    return checked


def check_node(node: NodePlace, server: str) -> Checked:
    """Check a node's folder, and its clock against the server's."""
    if not node.key.is_file():
        raise DeploymentError(f"{node.path} is not the directory of a node: it has no node.key")
    checked = _common()
    _check_certificates(checked, (node.authority,), "ask the server's operator for the new certificate")
    _check_client(checked, node)
    _check_clock(checked, node.authority, server)
    return checked


def _common() -> Checked:
    try:
        release = importlib.metadata.version("flwr")
    except importlib.metadata.PackageNotFoundError:
        return Checked()  # Flower may be installed elsewhere; the scripts find it by its name
    found = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    if not FLOWER[0] <= found < FLOWER[1]:
        first, end = (".".join(map(str, each)) for each in FLOWER)
        raise DeploymentError(f"flwr {release} is not supported; install a release from {first} and below {end}")
    return Checked()


# Certificates --------------------------------------------------------------------------------------------------------


def _check_certificates(checked: Checked, paths: Sequence[Path], remedy: str) -> None:
    """Check the first certificate of each file that has not expired: an old root may stand beside its successor."""
    now = datetime.datetime.now(datetime.UTC)
    for path in paths:
        certificates = certificates_in(path)
        if not (valid := unexpired(certificates)):
            raise DeploymentError(f"{path} expired on {certificates[0].not_valid_after_utc:%Y-%m-%d}; {remedy}")
        begins, ends = valid[0].not_valid_before_utc, valid[0].not_valid_after_utc
        if now < begins:
            raise DeploymentError(
                f"{path} is not valid before {begins:%Y-%m-%d %H:%M} UTC, and this machine's clock says "
                f"{now:%Y-%m-%d %H:%M} UTC; check the clock first"
            )
        if (left := ends - now).days < WARNING_DAYS:
            checked.warnings.append(f"{path} expires in {left.days} days, on {ends:%Y-%m-%d}; {remedy}")
        checked.expiries[path.name] = ends.timestamp()


def unexpired(certificates: Sequence[Any]) -> list[Any]:
    """Those of several certificates that have not expired."""
    now = datetime.datetime.now(datetime.UTC)
    return [each for each in certificates if now < each.not_valid_after_utc]


def certificates_in(path: Path) -> list[Any]:
    """The certificates in a file."""
    require_cryptography()
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(read_bounded(path, MOST_SETTINGS))
    except OSError as error:
        raise DeploymentError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError:
        raise DeploymentError(f"{path} is not a certificate") from None


# The client ----------------------------------------------------------------------------------------------------------


def _check_client(checked: Checked, node: NodePlace) -> None:
    """Read the policy and the ledger as the client will."""
    from fedcdp.deploy.protocol.client_ledger import ClientLedger
    from fedcdp.deploy.protocol.departure import has_left

    files = ClientFiles.of(node)
    ClientLedger.check_start(files.state, files.mark)
    if has_left(files.state):
        checked.warnings.append(
            "this client has left the federation and refuses every task; fedcdp deploy join brings it back"
        )


# The clock -----------------------------------------------------------------------------------------------------------


def _check_clock(checked: Checked, authority: Path, server: str) -> None:
    ahead = seconds_ahead(authority, server)
    if ahead is None:
        checked.warnings.append(f"{server} does not answer yet; the node waits for it, and its clock could not be checked")
    elif ahead > MOST_AHEAD + _ROUNDED or ahead < -MOST_BEHIND - _ROUNDED:
        direction = "ahead of" if ahead > 0 else "behind"
        raise DeploymentError(
            f"the clock of this machine is {abs(ahead):.0f} s {direction} the server's, which refuses signatures from more "
            f"than {MOST_AHEAD:g} s in its future or {MOST_BEHIND:g} s in its past; set the clocks first"
        )


def seconds_ahead(authority: Path, server: str) -> float | None:
    """By how much this machine's clock is ahead of a server's; None if the server does not answer or tells no time.

    Raises:
        DeploymentError: The server's certificate is not valid for this node.
    """
    host, _, port = server.rpartition(":")
    context = ssl.create_default_context(cafile=str(authority))
    connection = http.client.HTTPSConnection(host.strip("[]"), int(port), timeout=_CONNECT_SECONDS, context=context)
    try:
        connection.request("GET", "/")
        date = connection.getresponse().getheader("Date")
        here = datetime.datetime.now(datetime.UTC)
        return None if date is None else (here - email.utils.parsedate_to_datetime(date)).total_seconds()
    except ssl.SSLCertVerificationError as error:
        raise DeploymentError(f"the certificate of {server} is not valid here: {error.verify_message}") from None
    except (OSError, ValueError, TypeError, http.client.HTTPException):
        return None
    finally:
        connection.close()
