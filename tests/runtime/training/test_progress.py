"""The progress display, with a clock of its own."""

from __future__ import annotations

import io

from rich.console import Console

from splitjax.runtime.training.progress import AVERAGED_STEPS, TrainingProgress


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_rate_and_time_left_leave_the_first_step_out():
    clock = Clock()
    with TrainingProgress(Console(file=io.StringIO()), num_steps=11, batch_size=64, clock=clock) as progress:
        clock.now += 30  # compiling
        progress.update(2.0, 0.1)
        assert progress.examples_per_second is None
        for _ in range(5):
            clock.now += 0.5
            progress.update(1.0, 0.5)
    assert progress.examples_per_second == 128
    assert progress.seconds_left == 2.5


def test_a_log_gets_a_line_now_and_then():
    clock, text = Clock(), io.StringIO()
    with TrainingProgress(Console(file=text, width=120), num_steps=100, batch_size=8, clock=clock) as progress:
        for _ in range(100):
            clock.now += 1
            progress.update(0.5, 0.75)
    lines = text.getvalue().splitlines()
    assert len(lines) == 11  # the first, then one in ten seconds, of which the last is the last step's
    assert lines[0].startswith("step 1/100") and "left" not in lines[0]
    assert lines[1].startswith("step 11/100  loss 0.5000  accuracy 75.0%  8 examples/s  89 s left")
    assert lines[-1].startswith("step 100/100")


def test_the_shown_loss_is_a_running_mean():
    progress = TrainingProgress(Console(file=io.StringIO()), num_steps=100, batch_size=8, clock=Clock())
    for value in range(2 * AVERAGED_STEPS):
        progress.update(float(value), 0.0)
    assert f"loss {1.5 * AVERAGED_STEPS - 0.5:.4f}" in progress.text()


def test_a_terminal_gets_a_bar():
    clock, text = Clock(), io.StringIO()
    console = Console(file=text, width=140, force_terminal=True, color_system=None, force_interactive=True)
    with TrainingProgress(console, num_steps=4, batch_size=8, clock=clock) as progress:
        for _ in range(4):
            clock.now += 1
            progress.update(0.25, 1.0)
    shown = text.getvalue()
    assert "compiling the step" in shown and "4/4" in shown and "loss 0.2500" in shown and "step 1/4" not in shown
