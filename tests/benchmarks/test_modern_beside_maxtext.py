"""MaxText's own programs beside the large models: what is asked of the driver, what the page says, and bad input."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import stat
import sys

import pytest

from benchmarks._common import RESULTS, write_stored
from benchmarks.modern import beside_maxtext, large, main

NAME = beside_maxtext.CASES[0]
PROGRAM = large.Program({"all_gather over tensor": 30_000_000_000}, 1_500_000_000, 8_500_000_000, 0, 9_000_000_000)
DAYS = "2026-11-28", beside_maxtext.COUNTED_SINCE
PARAMETERS = 8_030_261_248
# A driver's stand-in: it compiles nothing, and answers with the file beside it.
DRIVER = """
import json, pathlib, sys
request, folder = map(pathlib.Path, sys.argv[1:])
answer = json.loads(pathlib.Path(__file__).with_name("answer.json").read_text())
assert json.loads(request.read_text())["arguments"]
(folder / "answer.json").write_text(json.dumps(answer))
(folder / "module.hlo").write_bytes(b"module")
"""


def ours(date):
    limited = dataclasses.replace(PROGRAM, temporary=6_500_000_000)
    program = dataclasses.replace(PROGRAM, sent={"all_reduce over tensor": 15 * 10**9})
    by_hand = dataclasses.replace(PROGRAM, temporary=11_000_000_000)
    return large.Measured(
        NAME, "1234567", date, PARAMETERS, program, 47 * 10**9, 14 * 10**9, 0.1, by_hand, 9 * 10**9, limited, None
    )


def stored(*found, date="2026-11-20"):
    page = {"header": "- 2026-11-20, commit 1234567", "cases": {NAME: dataclasses.asdict(ours(date))}}
    if found:
        kept = {each.key: dataclasses.asdict(each) for each in found}
        page[beside_maxtext.KEY] = {"header": "- 2026-11-21, commit 7654321", "cases": kept}
    return page


def settings(**other):
    case = large.CASES[NAME]
    sizes = {theirs: case.model[name] for theirs, name in beside_maxtext.SIZES.items()}
    return {**dict.fromkeys(beside_maxtext.SETTINGS, "as is"), **sizes, beside_maxtext.EXAMPLES: case.examples, **other}


def answer(**other):
    sizes = {"argument": 1_500_000_000, "temp": 8_500_000_000, "output": 1_500_000_007, "alias": 1_500_000_000}
    return {
        "versions": {"maxtext": "9.8.7", "jax": "6.5.4"}, "settings": settings(), "parameters": PARAMETERS, **sizes,
        "peak": 9_000_000_000, **other,
    }  # fmt: skip


FOUND = beside_maxtext.Found(
    NAME, beside_maxtext.NEAR, "7654321", "2026-11-21", {"maxtext": "9"}, ["a=b"], settings(), PARAMETERS, PROGRAM
)  # fmt: skip


@pytest.fixture
def driven(tmp_path, monkeypatch):
    """Makes a driver that gives an answer; gives a function that does."""

    def make(**other):
        (tmp_path / "driver.py").write_text(DRIVER)
        (tmp_path / "answer.json").write_text(json.dumps(answer(**other)))
        monkeypatch.setattr(beside_maxtext, "DRIVER", tmp_path / "driver.py")
        monkeypatch.setattr(beside_maxtext, "check", lambda *_: None)
        sent = lambda module, mesh: {f"of {module!r} on {mesh['fsdp']}": 7_000_000_000}
        monkeypatch.setattr(beside_maxtext, "sent_by", sent)
        (tmp_path / f"{large.PAGE}.json").write_text(json.dumps(stored()))
        return tmp_path

    return make


def test_the_page_has_the_section_of_what_the_driver_found_and_all_else_as_it_was(driven, tmp_path):
    folder = driven()
    before = write_stored(large.PAGE, stored(), large.page_lines, tmp_path / "before").read_text(encoding="utf-8")
    assert beside_maxtext.run([NAME], pathlib.Path(sys.executable), folder) == 0
    page = (folder / f"{large.PAGE}.md").read_text(encoding="utf-8")
    assert page.startswith(before)
    section = page[len(before) :]
    assert f"MaxText's environment has maxtext 9.8.7, jax 6.5.4 ({NAME}, near ours; {NAME}, by default)." in section
    assert f"| {NAME} | of b'module' on 16 | 7.000 | 7.000 |" in section
    assert "--maxtext-python PYTHON`" in section and str(folder) not in section
    assert f"| `vocab_size` | {large.CASES[NAME].model['vocab']} |" in section
    assert [line for line in section.splitlines() if "float32_logits=true" in line and "`train_compile" in line]
    assert "ici_fsdp_parallelism=16 ici_tensor_parallelism=4" in section


def test_programs_stand_beside_maxtexts_with_one_figure_in_a_cell():
    lines = large.page_lines(stored(FOUND))
    assert (
        f"| {NAME} | MaxText's, near ours | 30.000 | 1.000 | 10.000 | 1.000 | 1.500 | 8.500 | 0.000 | 9.000 |" in lines
    )
    assert f"| {NAME} | ours | 15.000 | 0.500 | 10.000 | 1.000 | 1.500 | 8.500 | 0.000 | 9.000 |" in lines
    assert f"| {NAME} | by hand | 30.000 | 1.000 | 12.500 | 1.250 | 1.500 | 11.000 | 0.000 | 9.000 |" in lines
    assert any(f"| {NAME} | ours, limited to 9.000 GB | 30.000 | 1.000 | 8.000 | 0.800 |" in line for line in lines)
    assert not any("| by hand, limited" in line for line in lines)  # it does not fit
    assert any("ours sends 0.500 of its bytes and the program by hand 1.000;" in line for line in lines)
    assert f"| {NAME} | all_gather over tensor | 30.000 |  |" in lines


def test_programs_that_were_read_by_an_older_reader_are_told():
    told = [any("counted once" in line for line in large.page_lines(stored(FOUND, date=day))) for day in DAYS]
    assert told == [True, False]


def test_a_page_without_maxtexts_figures_has_no_section():
    assert not any("MaxText's own compile" in line for line in large.page_lines(stored()))


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"settings": settings(mlp_dim=11008)}, "mlp_dim is 11008, not 14336"),
        ({"parameters": PARAMETERS - 1}, "another number than ours"),
    ],
)
def test_another_shape_than_ours_is_told_and_not_stored(driven, capsys, other, text):
    folder = driven(**other)
    assert beside_maxtext.run([NAME], pathlib.Path(sys.executable), folder) == 2
    assert text in capsys.readouterr().err
    assert not (folder / f"{large.PAGE}.md").exists()


def test_a_driver_that_fails_is_told_with_what_it_said(driven, capsys):
    folder = driven()
    (folder / "driver.py").write_text("raise SystemExit('no such topology')")
    assert beside_maxtext.run([NAME], pathlib.Path(sys.executable), folder) == 2
    assert "no such topology" in capsys.readouterr().err


def test_a_python_without_maxtext_or_none_at_all_is_told_before_anything_is_compiled(tmp_path, capsys):
    (tmp_path / f"{large.PAGE}.json").write_text(json.dumps(stored()))
    options = ["--only", "large", "--case", NAME, "--output", str(tmp_path), "--maxtext-python"]
    assert main.main([*options, sys.executable]) == 2
    assert "has no package maxtext\n  remedy: give the Python" in capsys.readouterr().err
    assert main.main([*options, str(tmp_path / "nothing")]) == 2
    assert "cannot be run: No such file" in capsys.readouterr().err
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\nexit 9\n")
    other.chmod(other.stat().st_mode | stat.S_IXUSR)
    assert main.main([*options, str(other)]) == 2
    assert "(exit status 9)" in capsys.readouterr().err


def test_cases_that_maxtext_or_the_page_has_not_are_told(tmp_path, capsys):
    options = ["--only", "large", "--output", str(tmp_path), "--maxtext-python", sys.executable, "--case"]
    assert main.main([*options, "Mixtral, v5p"]) == 2
    assert "is not compiled by MaxText" in capsys.readouterr().err
    assert main.main([*options, NAME]) == 2
    assert "compile it first, without --maxtext-python" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main.main(["--maxtext-python", sys.executable])
    assert "needs --only large" in capsys.readouterr().err


def test_stored_figures_are_of_the_shapes_of_the_cases():
    kept = json.loads((RESULTS / f"{large.PAGE}.json").read_text(encoding="utf-8"))
    for key, found in kept.get(beside_maxtext.KEY, {"cases": {}})["cases"].items():
        name, case = found["name"], large.CASES[found["name"]]
        assert key == f"{name}, {found['variant']}"
        assert found["arguments"] == beside_maxtext.arguments(name, found["variant"])
        assert found["settings"][beside_maxtext.EXAMPLES] == case.examples
        assert found["parameters"] == kept["cases"][name]["parameters"]
