"""Signals to commands: a line, the exit status that shells have, no traceback, and what was saved stays."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from splitjax.cli import _interrupt
from tests.runtime.conftest import until

ROOT = pathlib.Path(__file__).resolve().parents[2]
READY = "import sys; from splitjax.cli import script, _session\n"


@pytest.fixture
def ends():
    """The statuses with which the process would have ended, from `end_cleanly` on until the test is over."""
    statuses, restores = [], []

    def install(**options):
        restores.append(_interrupt.end_cleanly(exit_process=statuses.append, **options))
        return statuses

    yield install
    for restore in restores:
        restore()


def test_a_signal_ends_the_process_with_its_status(ends, capfd):
    statuses = ends()
    signal.raise_signal(signal.SIGINT)
    until(lambda: statuses == [130])
    signal.raise_signal(signal.SIGTERM)
    until(lambda: statuses == [130, 143])
    assert capfd.readouterr().err == "interrupted\nstopped by SIGTERM\n"


@pytest.mark.parametrize("second_ends", [True, False])
def test_who_takes_a_signal_over_has_it_once(ends, second_ends):
    statuses, taken = ends(second_ends=second_ends), []
    signal.signal(signal.SIGINT, lambda *_: taken.append(1))
    signal.raise_signal(signal.SIGINT)
    time.sleep(0.1)
    assert taken == [1] and statuses == []
    signal.raise_signal(signal.SIGINT)
    until(lambda: len(taken) == 2)
    time.sleep(0.1)
    assert statuses == ([130] if second_ends else [])


def test_handlers_are_put_back_and_what_is_ignored_stays_so(ends):
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    restore = _interrupt.end_cleanly(exit_process=print)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is _interrupt._noted
    restore()
    assert signal.getsignal(signal.SIGINT) is before and signal.set_wakeup_fd(-1) == -1
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_a_signal_that_comes_while_handlers_are_made_is_not_lost(ends, monkeypatch, capfd):
    install = signal.set_wakeup_fd

    def install_late(*arguments, **options):
        signal.raise_signal(signal.SIGINT)
        return install(*arguments, **options)

    monkeypatch.setattr(_interrupt.signal, "set_wakeup_fd", install_late)
    statuses = ends()
    monkeypatch.undo()
    until(lambda: statuses == [130])


def interrupted(code, *arguments, number=signal.SIGINT):
    """`splitjax ARGUMENTS` with `code` before it, which writes a line when it is to be interrupted."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{READY}{code}\nsys.argv[1:] = {list(arguments)!r}\nscript()"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert "now" in process.stdout.readline()
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    return process.returncode, err


COMPILING = """
import jax
def tell(event, seconds, fun_name="", **_):
    if "jaxpr_to_mlir" in event and "train_step" in fun_name:
        print("now", flush=True)
jax.monitoring.register_event_duration_secs_listener(tell)
"""


def test_ctrl_c_while_a_program_is_compiled():
    status, err = interrupted(COMPILING, "report", "--model", "vgg11", "--mesh", "data=2")
    assert status == 130 and err.endswith("interrupted\n") and "Traceback" not in err, err


def test_ctrl_c_while_a_call_into_c_does_not_return():
    code = "import ctypes; from splitjax.cli import _interrupt; _interrupt.end_cleanly(); print('now', flush=True)\n"
    code += "ctypes.CDLL(None).usleep(20_000_000); ctypes.CDLL(None).usleep(20_000_000)"
    began = time.monotonic()
    status, err = interrupted(code, "doctor", number=signal.SIGTERM)
    assert status == 143 and err == "stopped by SIGTERM\n" and time.monotonic() - began < 15


def test_ctrl_c_while_a_command_that_is_done_is_taken_down():
    # Python has taken its handlers away when it takes down modules.
    code = "import os, time\nclass Late:\n    def __del__(self, write=os.write, sleep=time.sleep):\n"
    code += "        write(1, b'now\\n'); sleep(0.5)\nlate, sys.stdout = Late(), open(os.devnull, 'w')"
    assert interrupted(code, "doctor") == (0, "")
