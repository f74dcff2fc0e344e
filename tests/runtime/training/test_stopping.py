"""Requests to stop, alone; those of several processes are tested with the launcher."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from splitjax.runtime.training.stopping import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_after_the_step(number):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.after(1)
        os.kill(os.getpid(), number)
        assert stop.after(2) and stop.exit_status == 128 + number
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_interrupts():
    with StopRequest():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_another_thread_takes_no_signals_over():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work():
        with StopRequest() as stop:
            seen.extend((stop.after(1), signal.getsignal(signal.SIGTERM) is before))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False, True]
