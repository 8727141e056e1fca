"""Faults: a process dies, or its disk fills up, at a chosen call that changes files.

Everything that Python code does to files below a directory goes through a few functions: opening for writing, `write` of a
raw file or descriptor, fsync, ftruncate, replace, unlink, mkdir. They are replaced by functions that count calls, and strike
at the n-th call. Only the process that installs them is changed, so this is done in a fork.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

How = Literal["kill", "tear", "full"]
"""`kill`: SIGKILL before the call. `tear`: SIGKILL after half of a write. `full`: no space left, from half of a write on."""


@dataclass(frozen=True)
class Strike:
    """The kind of fault, and the call at which it happens (counted from 0)."""

    how: How
    at: int


class Faults:
    """Counts a process's calls on the files of a place, logs them to `seen`, and strikes once."""

    def __init__(self, place: Path, strike: Strike | None, seen: Path) -> None:
        self._place, self._strike = place.absolute(), strike
        self._seen = os.open(seen, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._count = 0
        self._full = False
        self._write = os.write

    def install(self) -> None:
        """Install the faults in this process."""
        for name in ("fsync", "ftruncate", "replace", "unlink", "mkdir"):
            setattr(os, name, self._counted(name, getattr(os, name)))
        os.write = self._os_write  # type: ignore[assignment]
        os.open = self._os_opening(os.open)  # type: ignore[assignment]
        io.open = builtins.open = self._opening(io.open)  # type: ignore[assignment]

    # The calls -------------------------------------------------------------------------------------------------------

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *rest: Any, **options: Any) -> Any:
            if (file := self._ours(target)) is not None:
                # A full disk still allows deleting.
                self._happens(name, file, frees=name in ("unlink", "ftruncate"))
            return real(target, *rest, **options)

        return call

    def _os_write(self, descriptor: int, content: bytes) -> int:
        if (file := self._ours(descriptor)) is not None:
            self._happens("write", file, lambda: self._write(descriptor, content[: len(content) // 2]))
        return self._write(descriptor, content)

    def _os_opening(self, real: Callable[..., int]) -> Callable[..., int]:
        def open_(file: Any, flags: int, *rest: Any, **options: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR) and (name := self._ours(file)) is not None:
                self._happens("open", name)
            return real(file, flags, *rest, **options)

        return open_

    def _opening(self, real: Callable[..., Any]) -> Callable[..., Any]:
        faults = self

        class Raw(io.FileIO):
            def write(self, content: Any, /) -> int:
                half = bytes(content)[: len(content) // 2]
                faults._happens("write", faults._ours(self.fileno()) or "", lambda: super(Raw, self).write(half))
                return super().write(content)

        def open_(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: Any = None,
            errors: Any = None,
            newline: Any = None,
            **others: Any,
        ) -> Any:
            if not set(mode) & set("wax+") or (name := faults._ours(file)) is None:
                return real(file, mode, buffering, encoding, errors, newline, **others)
            if not isinstance(file, int):  # a descriptor was counted when it was opened
                faults._happens("open", name)
            raw = Raw(file if isinstance(file, int) else os.fspath(file), mode.replace("b", "").replace("t", ""))
            buffered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

        return open_

    # Striking --------------------------------------------------------------------------------------------------------

    def _ours(self, target: Any) -> str | None:
        """The path of a file or descriptor below the place; None for any other."""
        # Not Path.resolve: a rename concerns the name itself, whatever it points to.
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.path.abspath(target)  # noqa: PTH100, PTH115
        return path if path == str(self._place) or path.startswith(f"{self._place}{os.sep}") else None

    def _happens(self, call: str, file: str, half: Callable[[], Any] | None = None, frees: bool = False) -> None:
        number, self._count = self._count, self._count + 1
        self._write(self._seen, f"{call} {os.path.relpath(file, self._place)}\n".encode())
        if self._strike and number == self._strike.at:
            if self._strike.how != "kill" and half:
                half()
            if self._strike.how == "full":
                self._full = True
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        if self._full and not frees:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file)
