"""The demo, made small: it trains, tests, prints the plan, compares memory and writes its files."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
import time

import numpy as np
import pytest

from splitjax.cli.demo import Demo

SMALL = "demo --width 0.0625 --head-features 64 --batch-size 16 --steps 3"


def test_a_small_demo_from_beginning_to_end(run, tmp_path):
    status, out, _ = run(f"{SMALL} --output-dir made/here")
    assert status == 0
    assert "1438 images to train, 359 to test" in out
    assert re.search(r"step 1/3 .* loss \d", out) and "step 3/3" in out  # no terminal: lines, not a bar
    assert re.search(r"test accuracy \d+\.\d\d% after 3 steps; the step was compiled 1 time\b", out)
    assert "params/dense2" in out and "P(None, 'model')" in out
    state, step = (
        re.search(rf"{label}.*?([\d.]+) ([KM]iB) +([\d.]+) ([KM]iB) +([+-]\d+) %", out)
        for label in ("state \\(", "whole step")
    )
    size = lambda number, unit: float(number) * {"KiB": 2**10, "MiB": 2**20}[unit]
    assert size(state[3], state[4]) < size(state[1], state[2]) and int(state[5]) < 0
    assert size(step[1], step[2]) > size(state[1], state[2]), "a step holds its state and more"
    assert (tmp_path / "made/here/demo.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "made/here/plan.json").read_text())["rules"] == "splitbrain"


def test_the_folder_cannot_be_made(run, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, err = run(f"{SMALL} --output-dir file/folder")
    assert status == 2 and "--output-dir" in err


def test_a_batch_that_does_not_divide_lies_over_fewer_devices_and_the_plan_says_so(run, tmp_path):
    status, out, _ = run(f"demo --width 0.0625 --head-features 64 --batch-size 12 --steps 1 --output-dir {tmp_path}")
    assert status == 0
    said = " ".join(out.split())
    assert "12 examples do not divide by data x model=8, so they lie over model=4" in said
    assert "2.00 times an even share" in said


def test_a_batch_that_cannot_be_is_a_short_error(run):
    status, _, err = run("demo --width 0.0625 --head-features 64 --batch-size 0 --steps 1")
    assert status == 2 and "0" in err and "remedy" in err


def test_cifar10_is_read_from_shorter_official_files(tmp_path):
    labels = np.arange(20, dtype=np.uint8)[:, None] % 10
    records = np.concatenate([labels, np.zeros((20, 3072), np.uint8)], axis=1)
    for name in [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]:
        records.tofile(tmp_path / name)
    options = Demo(data="cifar10", data_dir=tmp_path, batch_size=16, epochs=2)
    dataset = options.load()
    assert (dataset.name, len(dataset.train["label"]), len(dataset.test["label"])) == ("cifar10", 100, 20)
    assert options.num_steps(dataset) == 12
    assert sum(1 for _ in options.batches(dataset)) == 12


def test_steps_limit_epochs_and_epochs_limit_steps():
    dataset = Demo().load()
    assert Demo(epochs=3).num_steps(dataset) == 66
    assert Demo(epochs=3, steps=10).num_steps(dataset) == 10
    assert Demo(epochs=1, steps=1000).num_steps(dataset) == 22


@pytest.mark.slow
def test_the_demo_as_shipped_reaches_its_accuracy_in_three_minutes(tmp_path):
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "splitjax.cli", "demo", "--output-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=pathlib.Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begin < 180
    assert float(re.search(r"test accuracy ([\d.]+)%", done.stdout)[1]) >= 97
