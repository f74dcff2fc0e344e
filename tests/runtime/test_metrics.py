"""Files with a line a step, and how a resumed run finds them."""

from __future__ import annotations

import pytest

from splitjax.errors import DataError
from splitjax.runtime.metrics import JsonLines, Table, TensorBoard, read_metrics

COLUMNS = ("step", "loss", "eval_loss")


def write(observer, steps):
    for step in steps:
        observer.step({"step": step, "loss": 1 / 3 / step, "eval_loss": None if step % 2 else 0.5})
    observer.close()


def test_one_line_a_step_and_numbers_to_the_last_bit(tmp_path):
    write(JsonLines(tmp_path / "new" / "m.jsonl"), (1, 2))
    assert read_metrics(tmp_path / "new" / "m.jsonl") == [{"step": 1, "loss": 1 / 3}, {"step": 2, "loss": 1 / 6, "eval_loss": 0.5}]


def test_a_resumed_run_goes_on_behind_its_checkpoint(tmp_path):
    file = tmp_path / "m.jsonl"
    write(JsonLines(file), range(1, 8))
    with open(file, "a") as torn:
        torn.write('{"step": 8, "lo')  # killed while it wrote
    write(JsonLines(file, resume_step=5), (6, 7))
    assert [row["step"] for row in read_metrics(file)] == [1, 2, 3, 4, 5, 6, 7]
    assert [path.name for path in tmp_path.iterdir()] == ["m.jsonl"]


def test_a_new_run_begins_the_file_anew(tmp_path):
    write(JsonLines(tmp_path / "m.jsonl"), (1, 2, 3))
    write(JsonLines(tmp_path / "m.jsonl"), (1,))
    assert len(read_metrics(tmp_path / "m.jsonl")) == 1


def test_tables_have_their_header_once(tmp_path):
    file = tmp_path / "m.csv"
    write(Table(file, COLUMNS), (1, 2, 3))
    write(Table(file, COLUMNS, resume_step=2), (3, 4))
    lines = file.read_text().splitlines()
    assert lines[0] == "step,loss,eval_loss" and [line.split(",")[0] for line in lines[1:]] == ["1", "2", "3", "4"]
    assert lines[1].endswith(",") and lines[2].endswith(",0.5")


@pytest.mark.parametrize("make", [JsonLines, lambda path: Table(path, COLUMNS)])
def test_a_file_that_cannot_be_written_is_an_error(tmp_path, make):
    (tmp_path / "taken").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        make(tmp_path / "taken" / "m")


def test_tensorboard_is_an_option(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    with pytest.raises(DataError, match="pip install tensorboard"):
        TensorBoard(tmp_path)
