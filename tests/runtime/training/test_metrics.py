"""Files with a line a step, and how a resumed run finds them."""

from __future__ import annotations

import json
import sys
import time

import pytest

from splitjax.errors import DataError
from splitjax.runtime.training.metrics import JsonLines, Table, TensorBoard, WeightsAndBiases, read_metrics

COLUMNS = ("step", "loss", "eval_loss")


def write(observer, steps):
    for step in steps:
        observer.step({"step": step, "loss": 1 / 3 / step, "eval_loss": None if step % 2 else 0.5})
    observer.close()


def test_one_line_a_step_and_numbers_to_the_last_bit(tmp_path):
    write(JsonLines(tmp_path / "new" / "m.jsonl"), (1, 2))
    assert read_metrics(tmp_path / "new" / "m.jsonl") == [
        {"step": 1, "loss": 1 / 3},
        {"step": 2, "loss": 1 / 6, "eval_loss": 0.5},
    ]


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


@pytest.mark.parametrize("make", [JsonLines, lambda path, step=0: Table(path, COLUMNS, step)])
def test_a_full_disk_does_not_stop_training_and_loses_no_line(tmp_path, caplog, make):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    whole = make(tmp_path / "whole")
    write(whole, range(1, 30))
    lines = make(tmp_path / "m")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (333, before[1]))  # in the middle of a line
        for step in range(1, 29):
            lines.step({"step": step, "loss": 1 / 3 / step, "eval_loss": None if step % 2 else 0.5})
        with pytest.raises(DataError, match=r"the last \d+ lines of the metrics are not written: File too large"):
            other = make(tmp_path / "other")
            write(other, range(1, 30))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len((tmp_path / "m").read_bytes()) == 333
    assert caplog.text.count("its lines are kept until it can be") == 2  # once a file, not once a step
    write(lines, [29])
    assert (tmp_path / "m").read_bytes() == (tmp_path / "whole").read_bytes()
    write(make(tmp_path / "other", 5), [6])  # what a run finds that was killed meanwhile
    assert (tmp_path / "other").read_text().splitlines()[-1].replace('"', "").startswith(("{step: 6", "6,"))


@pytest.mark.parametrize("make", [JsonLines, lambda path, step=0: Table(path, COLUMNS, step)])
@pytest.mark.parametrize("harm", [b"\xff\xfe", b"\x0c"])
def test_a_damaged_line_is_told_and_kept_beside(tmp_path, caplog, make, harm):
    file = tmp_path / "m"
    write(make(file), range(1, 8))
    lines = file.read_bytes().splitlines(keepends=True)
    lines[3] = harm + lines[3][2:]
    file.write_bytes(b"".join(lines))
    write(make(file, 6), [7])
    assert "line 4 is damaged" in caplog.text
    assert (tmp_path / "m.damaged-1").read_bytes() == b"".join(lines)
    assert file.read_bytes() == b"".join(lines[:3] + lines[4:])


def test_tensorboard_is_an_option(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    with pytest.raises(DataError, match="pip install tensorboard"):
        TensorBoard(tmp_path)


def test_weights_and_biases_hears_every_step_and_goes_on_with_its_run(tmp_path, monkeypatch):
    """Offline: what would be uploaded is in a file of records, whose history has the rows."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    for steps in ((1, 2), (3,)):
        observer = WeightsAndBiases("project", tmp_path)
        for step in steps:
            observer.step({"step": step, "loss": 1.0 / step, "accuracy": None})
        observer.close()
    deadline = time.monotonic() + 30
    rows = []
    while len(rows) < 3 and time.monotonic() < deadline:  # W&B's own process may write the last of it a little later
        files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
        assert len({file.name for file in files}) == 1  # the same run, by its id
        rows = [row for file in files for row in wandb_history(file.read_bytes())]
        time.sleep(0.05)
    assert [(row["_step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert all("accuracy" not in row for row in rows)


def wandb_history(content):
    """The history of a file of W&B: a header of 7 bytes, then records as of LevelDB's log, in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    at, parts = 7, []
    while at + 7 <= len(content):
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts.append(content[at + 7 : at + 7 + size])
        at += 7 + size
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            if record.WhichOneof("record_type") == "history":
                yield {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}


def test_weights_and_biases_is_an_option(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(DataError, match="pip install wandb"):
        WeightsAndBiases("project", tmp_path)
