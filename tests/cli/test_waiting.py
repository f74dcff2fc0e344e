"""What is shown to who waits: nothing at first, and never where nobody looks."""

from __future__ import annotations

import io
import logging
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from splitjax._compat import telling_programs
from splitjax.cli._waiting import waiting
from splitjax.runtime.training.progress import TrainingProgress


def terminal(text: io.StringIO) -> Console:
    return Console(file=text, width=80, force_terminal=True, color_system=None, force_interactive=True)


def test_who_waits_sees_what_is_done():
    text = io.StringIO()
    with waiting("compiling the step of vgg11", terminal(text), patience_seconds=0.01) as say:
        time.sleep(0.3)
        say("measuring batch 2 of 2", 1, 2)
        time.sleep(0.3)
    assert "compiling the step of vgg11" in text.getvalue() and "measuring batch 2 of 2" in text.getvalue()
    assert "0:00:0" in text.getvalue() and text.getvalue().endswith("\x1b[2K"), "the line is gone in the end"


def test_programs_are_told_while_they_are_compiled(caplog):
    caplog.set_level(logging.INFO)
    told = []

    def program_of_mine(x):
        return jnp.sort(jnp.sin(x) @ x.T)

    with telling_programs(told.append):
        jax.jit(program_of_mine)(np.ones((64, 64)))
    assert told == ["program_of_mine", ""]
    assert not caplog.records, "what JAX logs does not change"
    with telling_programs(told.append):
        jax.jit(program_of_mine)(np.ones((64, 64)))
    assert len(told) == 2, "what is compiled already is not named"


def test_a_program_that_is_compiled_is_named():
    text = io.StringIO()
    with waiting("measuring", terminal(text), patience_seconds=0.0):
        logging.getLogger("jax._src.interpreters.pxla").debug("Compiling %s with %s", "jit(program_of_mine)", "types")
        time.sleep(0.3)
    assert "compiling program_of_mine" in text.getvalue()


def test_what_is_quick_shows_nothing():
    text = io.StringIO()
    with waiting("planning", terminal(text), patience_seconds=5):
        pass
    assert text.getvalue() == ""


def test_no_terminal_gets_nothing(capfd):
    with waiting("planning", patience_seconds=0.01) as say:
        say("compiling")
        time.sleep(0.05)
    assert capfd.readouterr() == ("", "")


def test_an_error_passes_and_ends_the_line():
    text = io.StringIO()
    with pytest.raises(ValueError, match="mine"), waiting("planning", terminal(text), patience_seconds=0.01):
        time.sleep(0.2)
        raise ValueError("mine")
    assert text.getvalue().endswith("\x1b[2K")


def test_a_log_has_its_lines_while_the_bar_is_elsewhere():
    log, bar = io.StringIO(), io.StringIO()
    with TrainingProgress(Console(file=log, width=80), 2, 8, live=terminal(bar)) as progress:
        progress.update(0.5, None)
        progress.update(0.25, None)
    assert log.getvalue().startswith("step 1/2  loss 0.5000") and "step 2/2" in log.getvalue()
    assert "compiling the step" in bar.getvalue() and "\x1b" not in log.getvalue()


def test_the_bar_of_a_training_names_what_is_compiled():
    bar = io.StringIO()
    with TrainingProgress(Console(file=io.StringIO(), width=80), 2, 8, live=terminal(bar)):
        logging.getLogger("jax._src.interpreters.pxla").debug("Compiling %s with %s", "jit(train_step)", "types")
        time.sleep(0.3)
    assert "compiling train_step" in bar.getvalue()
