"""`plan`, `lint`, `doctor`, and what every command does with mistakes."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys

import jax
import pytest
from rich.console import Console

import splitjax
from splitjax import display
from splitjax.cli import COMMANDS, print_error
from splitjax.cli._checks import Check
from splitjax.cli._memory import MemoryUse, comparison
from splitjax.cli._options import DEFAULT_MODEL, parse_mesh
from splitjax.cli._output import print_value
from splitjax.cli.doctor import advice, doctor_document, facts
from splitjax.cli.launch import traffic_document
from splitjax.cli.line.fields import options_of
from splitjax.cli.lint import lint_document
from splitjax.display import Document, Paragraph
from splitjax.errors import MeshError
from splitjax.machines.calibration import Calibration
from splitjax.rules import Finding
from splitjax.runtime.launch.outcome import Traffic

BROKEN_RULES = """
replicated_batch = "all"
[[rule]]
name = "dense"
kind = "conv"
shard = [{ out = "model" }]
"""


def test_help_lists_every_command_with_a_line(run):
    status, out, _ = run("--help")
    assert status == 0
    for command in ("demo", "train", "launch", "plan", "report", "profile", "simulate", "lint", "doctor", "calibrate"):
        assert f"\n  {command}  " in out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_shows_every_option(run, name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run(f"{name} --help")
    assert status == 0
    assert "None" not in out  # an option that may be absent is shown by its type alone
    assert max(map(len, out.splitlines())) <= 80
    for option in options_of(COMMANDS[name]):
        assert re.search(rf"(^|\s|, ){re.escape(option.flag)}(,|\s|$)", out), option.flag
        for choice in option.choices:
            assert choice in out


def test_the_same_model_is_the_default_everywhere():
    defaults = {
        option.default for name in COMMANDS for option in options_of(COMMANDS[name]) if option.flag == "--model"
    }
    assert defaults == {DEFAULT_MODEL, None}  # lint has none to check against unless it is told


def test_version(run):
    status, out, _ = run("--version")
    assert status == 0 and out.startswith(f"splitjax {splitjax.__version__} (JAX {jax.__version__}, Python 3.")


def test_no_command_shows_what_there_is(run):
    assert run("")[0] == 2 and run("") == (2, run("--help")[1], "")


@pytest.mark.parametrize("line", ["help plan", "--help plan", "-h plan"])
def test_help_may_stand_in_front(run, line):
    assert run(line) == run("plan --help")


def test_json_alone_on_the_standard_output(run):
    """`-` leaves it clean, for whoever reads it from a pipe."""
    for line in ("doctor", "lint splitbrain", "simulate --list", "plan --model mlp"):
        status, out, err = run(f"{line} --json -")
        assert status == 0 and json.loads(out) and err


def test_plan_prints_layers_specs_and_rules(run):
    status, out, _ = run("plan --model mlp --mesh data=2,model=4 --batch-size 32")
    assert status == 0
    assert "data=2 x model=4" in out and "32 examples" in out
    assert "params/dense1" in out and "P(None, 'model')" in out


def test_plan_writes_json_that_reads_back_and_a_page(run, tmp_path):
    status, _, _ = run("plan --model mlp --rules fsdp --mesh data=8 --json plan.json --html plan.html")
    assert status == 0
    plan = splitjax.Plan.load(tmp_path / "plan.json")
    assert plan.rules == "fsdp" and plan.mesh.num_devices == 8
    page = (tmp_path / "plan.html").read_text()
    assert page.startswith("<!doctype html>") and "params/dense1" in page


def test_plan_of_a_page_that_cannot_be_written(run):
    status, _, err = run("plan --model mlp --html missing/plan.html")
    assert status == 2 and "--html" in err and "remedy" in err


def test_plan_allocates_nothing_of_the_model(run, monkeypatch):
    # VGG-16 with ImageNet's head is 0.5 GB of parameters and 1.6 GB of state: making it would show in time and in
    # memory.
    def refuse(*args, **kwargs):
        raise AssertionError("a plan needs no device arrays")

    monkeypatch.setattr(jax, "device_put", refuse)
    status, out, _ = run("plan --model vgg16 --num-classes 1000")
    assert status == 0 and "(4096, 1000)" in out


def test_lint_of_shipped_rules_finds_no_error(run):
    for rules in ("splitbrain", "megatron", "fsdp", "data_parallel"):
        status, out, _ = run(f"lint {rules}")
        assert status == 0 and "0 errors" in out


def test_lint_against_a_model_exits_with_1_for_an_error(run, tmp_path):
    (tmp_path / "broken.toml").write_text(BROKEN_RULES)
    status, out, _ = run("lint broken.toml --model mlp --mesh data=2,model=4")
    assert status == 1
    assert "every parameter stays whole" in out and "1 error" in out


def test_lint_of_a_misspelt_name_says_which_was_meant(run):
    status, _, err = run("lint megaton")
    assert status == 2 and "did you mean 'megatron'" in err


def test_doctor_shows_versions_devices_and_cache(run, tmp_path):
    status, out, _ = run("doctor")
    assert status == 0
    assert splitjax.__version__ in out and "8 x cpu" in out and str(tmp_path / "cache") in "".join(out.split())
    assert out.startswith("this machine\nsystem ") and "\n\nadvice\n" in out
    assert out.count("good: ") == 2 and not list(tmp_path.glob(".splitjax*"))


def test_plan_for_a_machine_that_is_not_here(run):
    status, out, _ = run("plan --model mlp --mesh data=4,model=4 --target tpu:v5e:4x4")
    assert status == 0 and "time on tpu:v5e:4x4" in out and "a step takes at least" in out
    status, _, err = run("plan --model mlp --mesh data=4,model=4 --target tpu:v9:4x4")
    assert status == 2 and "no kind of device of this name" in err and "gpu:h200" in err


@pytest.mark.slow
def test_calibrate_writes_what_it_measured(run):
    status, out, _ = run("calibrate --quick --clock processor --json own.json")
    assert status == 0 and "elementwise float32" in out
    assert Calibration.load("own.json").clock == "processor"


def test_calibrate_looks_for_the_folder_first(run):
    status, _, err = run("calibrate --json nowhere/own.json")
    assert status == 2 and "there is no such folder" in err


@pytest.mark.parametrize("width", [60, 80, 200])
def test_doctor_fits_its_terminal(width):
    checks = [Check("collectives", False, "no answer within 60 s", "look at what connects the devices", 60.0)]
    text = display.show(doctor_document(facts(jax.devices()), checks, advice(jax.devices())), width)
    assert max(map(len, text.splitlines())) <= width and f"{len(jax.devices())} x cpu" in " ".join(text.split())
    assert "FAILED: no answer within 60 s" in text and "collectives: look at what connects" in text


@pytest.mark.parametrize("width", [60, 80, 200])
def test_findings_are_a_table_that_fits(width):
    findings = (
        Finding("error", "dense", "the mesh has no axis 'tensor'", "add the axis to the mesh, or name another one"),
        Finding("info", "", "every parameter stays whole", "name a model axis"),
    )
    text = display.show(lint_document("rule set mine: 1 rules", findings), width)
    title, table, counts = text.split("\n\n")
    assert title == "rule set mine: 1 rules" and counts == "1 error, 0 warnings, 1 info"
    head, rule, first, *rest = table.splitlines()
    assert head.split() == ["severity", "rule", "finding", "remedy"] and len(rule) <= width
    assert first.split()[:2] == ["error", "dense"] and any(line.startswith("info      (all)") for line in rest)
    assert lint_document("title", ()).verdict == "0 errors, 0 warnings, 0 info"


def test_what_is_printed_stays_what_it_is(capsys):
    """Neither markup, emoji nor colours, however the terminal is, and no line of a table is broken."""
    name = "[bold]batch[/bold]:smile: " + "x" * 150
    print_value(Document("", (Paragraph(name),)), Console(force_terminal=True, width=40))
    out = capsys.readouterr().out
    assert out.startswith("[bold]batch[/bold]:smile:\n") and "\x1b" not in out and max(map(len, out.split("\n"))) == 120


def test_memory_side_by_side():
    document = comparison(MemoryUse("data parallel", 8 * 2**20, 10 * 2**20), MemoryUse("mine", 2 * 2**20, 15 * 2**20))
    rows = [re.split(r"\s{2,}", line) for line in display.show(document, 100).splitlines()]
    assert rows[3] == ["state (parameters and optimizer)", "8.0 MiB", "2.0 MiB", "-75 %"]
    assert rows[4] == ["whole step as XLA compiled it", "10.0 MiB", "15.0 MiB", "+50 %"]


def test_traffic_of_workers():
    document = traffic_document("network, 200mbit a link", (Traffic(0, 1234567, 89), Traffic(1, 10, 20)))
    assert display.show(document, 80).splitlines() == [
        "network, 200mbit a link",
        "worker  sent (bytes)  received (bytes)",
        "──────────────────────────────────────",
        "     0     1,234,567                89",
        "     1            10                20",
    ]


@pytest.mark.parametrize("text", ["data", "data=two", "data=2,data=4", "=2", "data=-1", "", "data=0"])
def test_a_mesh_that_is_none(text):
    with pytest.raises(MeshError) as caught:
        parse_mesh(text)
    assert caught.value.remedy


def test_mesh_text():
    assert parse_mesh("data=2, model=4").axes == (("data", 2), ("model", 4))


@pytest.mark.parametrize(
    "line",
    [
        "plan --mesh data:2",
        "plan --model mlp --width 2",
        "plan --rules none",
        "plan --batch-size 0",
        "demo --epochs 0",
        "demo --data cifar10",
        "demo --data cifar10 --data-dir nowhere",
        "demo --batch-size 5000",
    ],
)
def test_mistakes_are_short_and_exit_with_2(run, line):
    status, _, err = run(line)
    assert status == 2
    assert err.startswith("error: ") and "remedy: " in err and "Traceback" not in err


def test_errors_fit_a_terminal_and_stay_whole_elsewhere():
    error = MeshError("the mesh has an axis that no rule of the set names", value="data=2", remedy="word " * 30 + "end")
    shown = {}
    for is_terminal in (True, False):
        file = io.StringIO()
        print_error(error, Console(file=file, force_terminal=is_terminal, color_system=None, width=40))
        shown[is_terminal] = file.getvalue().splitlines()
    assert shown[True][:3] == [
        "error: the mesh has an axis that no rule",
        "       of the set names",
        "  value:  'data=2'",
    ]
    assert max(map(len, shown[True])) <= 40 and all(line.startswith(" " * 10) for line in shown[True][4:])
    assert len(shown[False]) == 3 and shown[False][2].endswith("word end")


def test_traceback_on_request(run):
    with pytest.raises(MeshError):
        run("plan --mesh data:2 --traceback")


def test_unknown_option_exits_with_2(run):
    status, out, err = run("plan --colour red")
    assert status == 2 and "--colour" in out + err


def test_the_command_sets_up_its_own_virtual_devices(tmp_path):
    """In a fresh process without XLA_FLAGS: 6 devices for a mesh of 6, and the cache where it was asked for."""
    script = (
        "from splitjax.cli import main; import jax, sys; "
        "status = main(['plan', '--model', 'mlp', '--mesh', 'data=3,model=2', '--batch-size', '6']); "
        "print('devices', len(jax.devices()), jax.config.jax_compilation_cache_dir); sys.exit(status)"
    )
    environment = {
        key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**environment, "XDG_CACHE_HOME": str(tmp_path), "SPLITJAX_CACHE": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert f"devices 6 {tmp_path / 'splitjax' / 'compiled'}" in done.stdout
