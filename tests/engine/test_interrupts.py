from __future__ import annotations

import os
import signal
import threading

import pytest

from fedcdp.engine.runtime import deferred_interrupts, stop_if_asked


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_is_held_back_until_a_safe_place():
    reached = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():  # noqa: PT012
        press()
        reached.append("after")
        stop_if_asked()
        reached.append("never")
    assert reached == ["after"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_is_not_held_back():
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():  # noqa: PT012
        press()
        press()
        pytest.fail("not reached")
    stop_if_asked()  # nothing is left over


def test_ctrl_c_at_the_very_end_counts_too():
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        press()
    stop_if_asked()


def test_an_inner_one_leaves_it_to_the_outer_and_a_handler_of_others_stays():
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():  # noqa: PT012
        with deferred_interrupts():
            press()
        stop_if_asked()
    told = []
    before = signal.signal(signal.SIGINT, lambda *_: told.append(1))
    try:
        with deferred_interrupts():
            press()
    finally:
        signal.signal(signal.SIGINT, before)
    assert told == [1]


def test_another_thread_runs_as_it_would():
    done = []

    def work() -> None:
        with deferred_interrupts():
            stop_if_asked()
            done.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [1]
