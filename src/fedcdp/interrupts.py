"""Ctrl-C at a safe place: never inside a transformed function of torch, which cannot be left in the middle."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_asked = threading.Event()


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Hold back Ctrl-C until `stop_if_asked`; a second one is not held back. Outside the main thread, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # somebody else's, or ours from further out
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _asked.set()

    _asked.clear()
    signal.signal(signal.SIGINT, ask)
    try:
        yield
        stop_if_asked()
    finally:
        signal.signal(signal.SIGINT, before)
        _asked.clear()


def stop_if_asked() -> None:
    """A safe place: raises KeyboardInterrupt if Ctrl-C was pressed."""
    if _asked.is_set():
        _asked.clear()
        raise KeyboardInterrupt
