"""The mark of a client's ledger: how long it was and how it ended, in a file on another disk than the ledger.

```
MARK   {"member": "…", "lines": 17, "digest": "…of line 17…"}
```

A ledger restored from a backup forgets what was spent since. The mark only moves forward, after each line and before what
the line allows, so a ledger that lacks the marked line is older than the client, and is refused. After a crash between the
two, the ledger is one line ahead of its mark, which is accepted. The mark detects a restored ledger. It does not detect that
both were restored together, so a backup must not contain both: the owner's policy names the place (`ledger_mark`).

| ledger | mark | |
| --- | --- | --- |
| has the marked line, perhaps more | present | used; the mark moves |
| lacks the marked line, or is missing | present | refused |
| missing | missing | both begin |
| present | missing | refused: `begin` makes a mark for a ledger that its owner knows to be the latest |

A mark that is a symbolic link is refused: a write would put a file in the place of the link, on the disk of the link.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedcdp.errors import RunError
from fedcdp.files.disk import PRIVATE, not_written, write_atomically
from fedcdp.files.untrusted import MOST_SETTINGS, parse_json, read_bounded

_WHAT_TO_DO = (
    "restore the latest copy of the ledger; if there is none, what was spent since is unknown: lower epsilon in the policy "
    "by it, or to what is left in the worst case, and make a new mark with fedcdp deploy mark --forget"
)


@dataclass(frozen=True)
class LedgerMark:
    """The mark at a path."""

    path: Path

    def check(self, ledger: Path, member: str, digests: Sequence[str]) -> None:
        """Raise `RunError` unless a ledger with these lines is at least as long as the mark says, and is the same."""
        self._require_file()
        if not self.path.exists():
            if digests:
                raise RunError(
                    f"{ledger} has no mark at {self.path}: a ledger without its mark may be an old copy; if it is the "
                    "latest, make one with fedcdp deploy mark"
                )
            return
        marked, lines, digest = self._read()
        if digests and marked != member:
            raise RunError(f"{self.path} is the mark of another client's ledger than {ledger}")
        if len(digests) < lines or digests[lines - 1] != digest:
            raise RunError(
                f"{ledger} is older than its mark: it has {len(digests)} lines, and had {lines} or more "
                f"({self.path}); {_WHAT_TO_DO}"
            )

    def keep(self, member: str, digests: Sequence[str]) -> None:
        """Move the mark to the end of the ledger; it is on disk on return."""
        if self.path.exists() and self._read() == (member, len(digests), digests[-1]):
            return
        content = json.dumps({"member": member, "lines": len(digests), "digest": digests[-1]}).encode()
        try:
            write_atomically(self.path, content, PRIVATE)
        except OSError as error:
            raise not_written(self.path, error) from error

    def begin(self, ledger: Path, member: str, digests: Sequence[str], *, forget: bool) -> None:
        """Make a mark for an existing ledger. With `forget`, also for one that is older than an existing mark."""
        self._require_file()
        if self.path.exists() and not forget:
            self.check(ledger, member, digests)
        self.keep(member, digests)

    def _require_file(self) -> None:
        """Raise for a symbolic link."""
        if self.path.is_symlink():
            raise RunError(f"{self.path} is a symbolic link, which is not followed: name the file itself in ledger_mark")

    def _read(self) -> tuple[str, int, str]:
        try:
            written = parse_json(read_bounded(self.path, MOST_SETTINGS))
            member, lines, digest = written["member"], written["lines"], written["digest"]
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {error.strerror or error}") from error
        except (ValueError, TypeError, KeyError):
            raise RunError(f"{self.path} is damaged; {_WHAT_TO_DO}") from None
        if not (isinstance(member, str) and isinstance(digest, str) and type(lines) is int and lines >= 1):
            raise RunError(f"{self.path} is damaged; {_WHAT_TO_DO}")
        return member, lines, digest
