"""How a node or a server is run: `operate.toml` in its folder, which only its owner reads and writes.

```toml
listen = "127.0.0.1:9401"   # /metrics and /healthz; "": nothing listens
log-format = "text"         # or "json"
log-file = ""               # "": standard output
log-bytes = 10000000        # size at which a file is rotated
log-files = 5               # rotated files to keep
```

A deployment of an earlier version has no such file: then nothing listens, and the log goes to standard output.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fedcdp.config.fields import check_types, option
from fedcdp.deploy.site.flower_log import FORMATS
from fedcdp.errors import DeploymentError, FedcdpError
from fedcdp.files.untrusted import MOST_SETTINGS, parse_toml, read_bounded

OVERRIDE = "FEDCDP_MONITOR"
"""Environment variable that takes precedence over `listen`: an address, or `off`."""
FIRST_MONITOR_PORT = 9400  # the server's; node K of one machine has the K-th above
_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})")


def monitor_address(number: int) -> str:
    """Where the server (0) or a node of a new deployment can be watched: on the loopback."""
    return f"127.0.0.1:{FIRST_MONITOR_PORT + number}"


@dataclass(frozen=True, kw_only=True)
class OperateSettings:
    """`operate.toml`."""

    listen: str = option("", "Address for /metrics and /healthz, host:port; empty: nothing listens.")
    log_format: str = option("text", "text or json.")
    log_file: str = option("", "File of the log, relative to the folder; empty: standard output.")
    log_bytes: int = option(10_000_000, "Bytes at which the file of the log is rotated.")
    log_files: int = option(5, "Rotated files to keep.")

    def __post_init__(self) -> None:
        check_types(self)
        found = _ADDRESS.fullmatch(self.listen)
        if self.listen and not (found and 0 < int(found[1]) < 2**16):
            raise DeploymentError(f"listen: {self.listen!r} is not allowed; it must be host:port, or empty")
        if self.log_format not in FORMATS:
            raise DeploymentError(f"log-format: {self.log_format!r} is not allowed; it must be one of {', '.join(FORMATS)}")
        if not 10_000 <= self.log_bytes < 2**40:
            raise DeploymentError(f"log-bytes: {self.log_bytes} is not allowed; it must be at least 10000 and below 2^40")
        if not 1 <= self.log_files <= 1000:
            raise DeploymentError(f"log-files: {self.log_files} is not allowed; it must be at least 1 and at most 1000")

    @staticmethod
    def read(folder: Path) -> OperateSettings:
        """The settings of a node or a server, with the address of the environment if it has one."""
        path = folder / "operate.toml"
        try:
            written: dict[str, Any] = parse_toml(read_bounded(path, MOST_SETTINGS))
        except FileNotFoundError:
            written = {}
        except OSError as error:
            raise DeploymentError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise DeploymentError(f"{path} is not a TOML file: {error}") from None
        known = {each.name.replace("_", "-"): each.name for each in fields(OperateSettings)}
        if unknown := written.keys() - known.keys():
            raise DeploymentError(f"{path}: there is no setting called {min(unknown)!r}; there are {', '.join(known)}")
        try:
            settings = OperateSettings(**{known[name]: value for name, value in written.items()})
        except FedcdpError as error:
            raise DeploymentError(f"{path}: {error}") from None
        return settings._overridden()

    def _overridden(self) -> OperateSettings:
        if not (other := os.environ.get(OVERRIDE)):
            return self
        try:
            return replace(self, listen="" if other == "off" else other)
        except DeploymentError as error:
            raise DeploymentError(f"{OVERRIDE}: {error}") from None
