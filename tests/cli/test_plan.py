"""`splitjax plan` in a run of tests: `--lock`, `--assert-max-memory`, `--assert-max-collective-bytes`, and what the
compilers of machines say."""

from __future__ import annotations

import importlib.metadata
import pathlib

import pytest

from splitjax.display.figures import bytes_of
from splitjax.planning.plan_lock import PlanLock
from splitjax.report.target.value import TargetCheck

PLAN = "plan --model mlp --model-option features=(16,16) --batch-size 32"


def test_a_lock_is_written_compared_and_written_anew(run, tmp_path):
    status, _, err = run(f"{PLAN} --lock plan.lock")
    assert status == 2 and "no lock" in err and "--update-lock" in err
    assert run(f"{PLAN} --lock plan.lock --update-lock")[0] == 0
    first = PlanLock.load(tmp_path / "plan.lock")
    status, out, _ = run(f"{PLAN} --lock plan.lock")
    assert status == 0 and "every decision is the same" in out
    status, out, _ = run(f"{PLAN} --lock plan.lock --rules megatron")
    assert status == 1 and "changed: rules: splitbrain -> megatron" in out and "--update-lock" in out
    assert PlanLock.load(tmp_path / "plan.lock") == first
    assert run(f"{PLAN} --lock plan.lock --rules megatron --update-lock")[0] == 0
    assert run(f"{PLAN} --lock plan.lock --rules megatron")[0] == 0


def test_budgets(run):
    status, out, _ = run(f"{PLAN} --assert-max-memory 1GiB --assert-max-collective-bytes 1GB")
    assert status == 0 and "of 1.0 GiB" in out
    status, out, _ = run(f"{PLAN} --assert-max-memory 100kB")
    assert status == 1 and "more than the 97.7 KiB that it may be" in out and "at the peak" in out
    status, out, _ = run(f"{PLAN} --assert-max-collective-bytes 1kB")
    assert status == 1 and "sent by a device in a step" in out and "all_" in out


def test_a_memory_timeline_is_predicted(run, tmp_path):
    status, out, _ = run(f"{PLAN} --memory-timeline --html plan.html --svg plan.svg")
    drawn = (tmp_path / "plan.svg").read_text()
    assert "memory of a device during" in drawn and ">predicted: " in drawn and ">compiled: " not in drawn
    assert status == 0 and "predicted: " in out and "compiled: " not in out and "the peak" in out
    assert (tmp_path / "plan.html").read_text().count("<svg") == 1


@pytest.mark.parametrize(
    "options", ["--assert-max-memory much", "--assert-max-collective-bytes -3", "--update-lock", "--lock ."]
)
def test_options_that_make_no_check_are_refused(run, options):
    status, _, err = run(f"{PLAN} {options}")
    assert status == 2 and "remedy" in err


def test_sizes_as_people_write_them():
    assert [bytes_of(text) for text in ("14GiB", "2 GB", "1.5MiB", "4096", "0", "3k")] == [
        14 << 30, 2 * 10**9, 3 << 19, 4096, 0, 3000,
    ]  # fmt: skip
    for text in ("", "-1", "1e9", "GiB", "14GiBs", "1..2"):
        with pytest.raises(ValueError, match="no number of bytes"):
            bytes_of(text)


@pytest.mark.slow
def test_rules_and_meshes_that_are_chosen(run):
    status, out, _ = run(f"{PLAN} --rules auto --mesh auto --devices 8 --memory-budget 16GiB")
    assert status == 0 and "certified gap" in out
    status, out, _ = run(f"{PLAN} --mesh auto --devices 8 --rules megatron --memory-budget 16GiB")
    assert status == 0 and 'mesh="auto" chose data=' in out.replace("\n", " ")
    status, out, _ = run(f"{PLAN} --choose-state --rules data_parallel --memory-budget 16GiB")
    assert status == 0 and 'shard_state="auto" chose data=' in out.replace("\n", " ")
    status, out, _ = run(f"{PLAN} --microbatches auto --rules data_parallel --memory-budget 16GiB")
    assert status == 0 and "microbatches: 1, which is within the budget" in " ".join(out.split())
    status, out, _ = run(f"{PLAN} --microbatches 2 --rules data_parallel")
    assert status == 0 and "in 2 microbatches" in " ".join(out.split())
    status, _, err = run(f"{PLAN} --microbatches some")
    assert status == 2 and "--microbatches" in err
    status, out, _ = run("plan --model transformer --mesh data=8 --rules data_parallel --remat nothing_saveable")
    assert status == 0 and "nothing of params/block* kept; the backward pass computes the rest again" in out
    status, out, _ = run(f"{PLAN} --remat auto --rules data_parallel --memory-budget 16GiB")
    assert status == 0 and "remat: nothing is computed again: its loss has no blocks" in " ".join(out.split())
    status, _, err = run(f"{PLAN} --remat some")
    assert status == 2 and "--remat" in err
    status, _, err = run(f"{PLAN} --choose-state --shard-state")
    assert status == 2 and "--choose-state" in err
    status, out, _ = run(f"{PLAN} --mesh auto --rules auto --target tpu:v5e:2x4")
    assert status == 0 and "certified gap" in out and "time on tpu:v5e:2x4" in out
    measured = pathlib.Path(__file__).parents[1] / "codec" / "data" / "calibration.json"
    status, out, _ = run(f"{PLAN} --mesh auto --devices 8 --rules auto --target {measured}")
    assert status == 0 and "ms as a program" in out.replace("\n", " ") and "time on " in out
    status, _, err = run(f"{PLAN} --rules auto --memory-budget 100B")
    assert status == 2 and "no layout that was found fits" in err


@pytest.mark.parametrize(
    "options", ["--mesh auto --rules auto", "--mesh auto --devices 0", "--devices 8", "--memory-budget 1GiB"]
)
def test_choices_that_lack_something(run, options):
    status, _, err = run(f"{PLAN} {options}")
    assert status == 2 and ("--mesh auto" in err or 'rules="auto"' in err or "--devices must be above 0" in err)


def test_a_layer_is_explained(run):
    status, out, _ = run(f"{PLAN} --explain dense1 --target tpu:v5e:2x4")
    assert status == 0 and "as planned" in out and "tpu:v5e:2x4" in out and "every layout of it" in out
    status, _, err = run(f"{PLAN} --explain dense7")
    assert status == 2 and "no such layer" in err and "dense1" in err


def test_machines_are_compared(run, tmp_path):
    page = tmp_path / "page.html"
    status, out, _ = run(f"{PLAN} --rules data_parallel --pareto tpu:v5e:2x2 --pareto gpu:h100:1x2 --html {page}")
    assert status == 0 and "the fewest devices that fit" in out and "tpu:v5e:2x2" in out and "gpu:h100" in out
    assert "<circle" in page.read_text()
    status, out, _ = run(f"{PLAN} --rules data_parallel --pareto gpu:h100:1x2 --memory-budget 1KiB")
    assert status == 1 and "nothing fits within 1.0 KiB a device" in out
    status, _, err = run(f"{PLAN} --pareto tpu:v5e:2x2 --target tpu:v5e:2x4")
    assert status == 2 and "--target" in err and "--pareto too" in err
    status, _, err = run(f"{PLAN} --pareto tpu:v5e:2x2 --svg {tmp_path / 'plan.svg'}")
    assert status == 2 and "--svg" in err and "compares many" in err
    status, _, err = run(f"{PLAN} --pareto tpu:v99:2x2")
    assert status == 2 and "--pareto" in err


def test_the_compiler_of_a_machine_says_whether_it_fits(run, tmp_path):
    status, out, _ = run(f"{PLAN} --target cpu:8 --memory-budget 1GiB --html page.html --compiled-json check.json")
    assert status == 0 and "fits: as compiled a device needs" in out and "time on" not in out
    check = TargetCheck.from_json((tmp_path / "check.json").read_text())
    assert check.target == "cpu:8" and check.budget_bytes == 1 << 30 and check.fits
    assert "memory per device" in (tmp_path / "page.html").read_text()
    # Rules and mesh are said: the budget decides about what is compiled alone.
    status, out, _ = run(f"{PLAN} --target cpu:8 --mesh data=2,model=4 --memory-budget 4KiB")
    assert status == 1 and "does not fit: as compiled" in out and "4.0 KiB (the budget)" in out
    status, out, _ = run(f"{PLAN} --target cpu:8 --compile never")
    assert status == 0 and "as compiled" not in out


@pytest.mark.parametrize(
    "options",
    ["--compile always", "--compiled-json check.json", "--target cpu:8 --compile never --compiled-json c.json"],
)
def test_what_compiles_for_no_machine(run, options):
    status, _, err = run(f"{PLAN} {options}")
    assert status == 2 and "no machine to compile for" in err and "--target" in err


def test_a_compiler_that_is_not_installed(run, monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    target = "--target gpu:h200:1x8 --mesh data=2,model=4 --memory-budget 1GiB"
    status, out, _ = run(f"{PLAN} {target}")
    assert (
        status == 0 and "not compiled: the compiler of gpu:h200 is not installed" in out and "by the prediction" in out
    )
    status, _, err = run(f"{PLAN} {target} --compile always")
    assert status == 2 and "is not installed" in err and "jax[cuda13]" in err


@pytest.mark.tpu_aot
def test_a_tpu_that_is_not_here_says_whether_it_fits(run):
    status, out, _ = run(f"{PLAN} --target tpu:v5e:2x2 --memory-budget 16GiB")
    assert status == 0 and "on tpu:v5e:2x2" in out and "fits: as compiled" in out and "(HBM)" in out
    status, out, _ = run(f"{PLAN} --target tpu:v5e:2x2 --mesh data=2,model=2 --batch-size 262144 --memory-budget 32MiB")
    assert status == 1 and "the compiler refuses it" in out
