"""Rows that stay in their files: what an array would give, read only where asked for."""

import gc
import os
import pathlib
import threading

import numpy as np
import pytest

from splitjax.data import rows as rows_module
from splitjax.data.rows import FileRows, Part
from splitjax.errors import DataError


@pytest.fixture
def both(tmp_path):
    """The same 9 rows as an array and in two files, behind headers of different length."""
    values = np.random.default_rng(0).integers(0, 256, (9, 6), dtype=np.uint8)
    (tmp_path / "a").write_bytes(b"head" + values[:4].tobytes())
    (tmp_path / "b").write_bytes(values[4:].tobytes() + b"tail")
    parts = [Part(tmp_path / "a", 4, 4), Part(tmp_path / "b", 0, 5)]
    return FileRows(parts, row_bytes=6, row_shape=(3, 2), decode=lambda rows: rows.reshape(-1, 3, 2)), values.reshape(
        9, 3, 2
    )


@pytest.mark.parametrize(
    "key",
    [0, -1, 8, slice(None), slice(2, 7, 3), slice(5, 5), [3, 3, -9, 8], np.array([], int), np.arange(9) % 2 == 0],
)
def test_rows_are_those_of_an_array(both, key):
    rows, values = both
    np.testing.assert_array_equal(rows[key], values[key])
    assert rows[key].dtype == np.uint8


def test_it_looks_like_an_array(both):
    rows, values = both
    assert (rows.shape, rows.ndim, rows.dtype, len(rows), rows.nbytes) == (
        values.shape,
        3,
        values.dtype,
        9,
        values.nbytes,
    )
    np.testing.assert_array_equal(np.asarray(rows), values)
    assert np.asarray(rows, np.float32).dtype == np.float32
    with pytest.raises(IndexError):
        rows[9]
    with pytest.raises(IndexError, match="only whole rows"):
        rows[0, 1]
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(rows, copy=False)


def test_only_the_rows_asked_for_are_read(both, monkeypatch):
    rows, values = both
    read, pread = [], os.pread
    monkeypatch.setattr(
        rows_module.os, "pread", lambda fd, size, offset: read.append((size, offset)) or pread(fd, size, offset)
    )
    np.testing.assert_array_equal(rows[[5, 0]], values[[5, 0]])
    assert read == [(6, 6), (6, 4)]


def test_a_file_cut_short_while_open_is_an_error_that_names_the_place(both, tmp_path):
    rows, values = both
    os.truncate(tmp_path / "b", 14)
    np.testing.assert_array_equal(rows[[0, 5]], values[[0, 5]])
    with pytest.raises(DataError, match="become shorter") as caught:
        rows[6]
    assert caught.value.place == f"{tmp_path / 'b'}, byte offset 12: 6 bytes wanted" and caught.value.value == 2


def test_a_file_replaced_while_open_goes_on_being_read(both, tmp_path):
    rows, values = both
    (tmp_path / "new").write_bytes(b"")
    os.replace(tmp_path / "new", tmp_path / "a")
    np.testing.assert_array_equal(np.asarray(rows), values)


def test_threads_may_share_it(both):
    rows, values = both
    wrong = []

    def read(seed):
        for indices in np.random.default_rng(seed).integers(0, 9, (200, 5)):
            if not np.array_equal(rows[indices], values[indices]):
                wrong.append(indices)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_files_are_closed_with_it(tmp_path):
    (tmp_path / "a").write_bytes(bytes(4))

    def is_open():
        return any(
            pathlib.Path("/proc/self/fd", name).exists() and os.readlink(f"/proc/self/fd/{name}") == str(tmp_path / "a")
            for name in os.listdir("/proc/self/fd")
            if os.path.islink(f"/proc/self/fd/{name}")
        )

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")
    rows = FileRows([Part(tmp_path / "a", 0, 2)], row_bytes=2, row_shape=(2,), decode=lambda rows: rows)
    assert is_open()
    del rows
    gc.collect()
    assert not is_open()


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"cannot be read[\s\S]*gone"):
        FileRows([Part(tmp_path / "gone", 0, 2)], row_bytes=2, row_shape=(2,), decode=lambda rows: rows)
