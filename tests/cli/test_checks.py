"""What the doctor tries, on what is well and on what is not."""

from __future__ import annotations

import time

import jax
import numpy as np
import pytest

from splitjax.cli import _checks
from splitjax.cli._checks import check_collectives, check_folder


def test_collectives_of_virtual_devices_are_right():
    check = check_collectives(jax.devices())
    assert check.passed and f"over {len(jax.devices())} devices" in check.found and not check.remedy


def test_wrong_numbers_are_found(monkeypatch):
    monkeypatch.setattr(jax.lax, "psum", lambda row, axis: 2 * row)
    monkeypatch.setattr(jax.lax, "ppermute", lambda row, axis, ring: row)
    check = check_collectives(jax.devices())
    assert not check.passed and check.found.startswith("wrong numbers from sum, passing on") and check.remedy


def test_one_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(_checks, "wrong_collectives", lambda devices: time.sleep(1))
    check = check_collectives(jax.devices(), limit_seconds=0.05)
    assert not check.passed and check.found == "no answer within 0.05 s" and check.seconds < 0.5


def test_one_that_fails_is_told(monkeypatch):
    def fail(devices):
        raise RuntimeError("NCCL operation failed\nmore")

    monkeypatch.setattr(_checks, "wrong_collectives", fail)
    assert check_collectives(jax.devices()).found == "RuntimeError: NCCL operation failed"


def test_a_folder_that_will_be_made_is_tried_above(tmp_path):
    check = check_folder(tmp_path / "runs" / "first")
    assert check.passed and check.found.startswith(f"{tmp_path} keeps what is written") and not list(tmp_path.iterdir())


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    check = check_folder(tmp_path / "file")
    assert not check.passed and "cannot be written to" in check.found and "--checkpoint-dir" in check.remedy


def test_a_disk_that_changes_what_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(
        _checks, "replace_atomically", lambda path, write: path.write_bytes(np.zeros(2**23, np.uint8).tobytes())
    )
    check = check_folder(tmp_path)
    assert not check.passed and "gives back other bytes" in check.found


@pytest.mark.parametrize("free_bytes", [2**20])
def test_a_full_disk(tmp_path, monkeypatch, free_bytes):
    usage = _checks.shutil.disk_usage(tmp_path)._replace(free=free_bytes)
    monkeypatch.setattr(_checks.shutil, "disk_usage", lambda folder: usage)
    check = check_folder(tmp_path)
    assert not check.passed and "make room" in check.remedy
