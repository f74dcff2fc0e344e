"""Criteo's lines and rows: read exactly, part by part, and refused with the line when they are damaged."""

import gzip
import tracemalloc

import numpy as np
import pytest

from splitjax.data import _criteo_text, load_criteo
from splitjax.errors import DataError


def lines(num, seed=0):
    """Lines as the official ones: some numbers and categories missing, some numbers below 0."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(num):
        values = [str(value) if value > -3 else "" for value in rng.integers(-5, 90, 13)]
        categories = [f"{value:08x}" if value % 5 else "" for value in rng.integers(0, 1 << 32, 26)]
        made.append("\t".join([str(number % 3 // 2), *values, *categories]))
    return made


def expected(made, rows):
    """(ids, values, labels), read line by line."""
    split = [line.split("\t") for line in made]
    ids = [[1 + int(text, 16) % (rows - 1) if text else 0 for text in fields[14:]] for fields in split]
    values = [[float(text or 0) for text in fields[1:14]] for fields in split]
    return np.array(ids), np.array(values), np.array([int(fields[0]) for fields in split])


def write(folder, made, name="train.txt", end="\n"):
    (folder / name).write_text("\n".join(made) + end)
    return folder / name


@pytest.mark.parametrize("part_bytes", [700, 1 << 22])  # many parts, or one
@pytest.mark.parametrize(("rows", "end"), [(2, "\n"), (1000, ""), (1 << 31, "\n")])
def test_lines_become_arrays(tmp_path, monkeypatch, part_bytes, rows, end):
    monkeypatch.setattr(_criteo_text, "PART_BYTES", part_bytes)
    made = lines(25)
    dataset = load_criteo(write(tmp_path, made, end=end), rows=rows)
    ids, values, labels = expected(made, rows)
    assert (dataset.num_train, dataset.num_test, dataset.num_classes, dataset.field_sizes) == (23, 2, 2, (rows,) * 26)
    for name, whole, dtype in (("ids", ids, np.int32), ("values", values, np.float32), ("label", labels, np.int32)):
        split = np.concatenate([dataset.train[name], dataset.test[name]])
        assert split.dtype == dtype and np.shares_memory(dataset.train[name], dataset.test[name].base)
        np.testing.assert_array_equal(split, whole)


def test_batches_hold_logarithms_of_numbers(tmp_path):
    made = lines(20)
    dataset = load_criteo(write(tmp_path, made))
    _, values, _ = expected(made, 2)
    assert (values < 0).any()
    (batch,) = dataset.test_batches(2)
    np.testing.assert_allclose(batch["values"], np.log(np.maximum(values[-2:], 0) + 1), rtol=1e-6)
    assert batch["values"].dtype == np.float32 and batch.keys() == {"ids", "values", "label", "mask"}


def test_packed_text_and_folders_are_found(tmp_path):
    made = lines(20)
    (tmp_path / "train.txt.gz").write_bytes(gzip.compress("\n".join(made).encode()))
    write(tmp_path, [line.split("\t", 1)[1] for line in made], "test.txt")  # the archive's, without labels
    dataset = load_criteo(tmp_path, rows=50)
    np.testing.assert_array_equal(dataset.train["ids"], expected(made, 50)[0][:18])
    (tmp_path / "train.txt.gz").rename(tmp_path / "day_0")
    np.testing.assert_array_equal(load_criteo(tmp_path / "day_0", rows=50).test["ids"], expected(made, 50)[0][18:])
    with pytest.raises(DataError, match="it has no label"):
        load_criteo(tmp_path / "test.txt")


def test_arrays_are_read_as_they_are(tmp_path):
    ids, values, labels = expected(lines(30), 40)
    np.savez_compressed(
        tmp_path / "rows.npz", ids=ids.astype(np.int64), values=values, clicked=labels.astype(np.int8), other=1
    )
    dataset = load_criteo(tmp_path)
    assert dataset.field_sizes == tuple(ids.max(0) + 1)
    np.testing.assert_array_equal(np.concatenate([dataset.train["ids"], dataset.test["ids"]]), ids)
    assert {name: array.dtype for name, array in dataset.train.items()} == {
        "ids": np.int32,
        "values": np.float32,
        "label": np.int32,
    }


def replaced(made, line, column, text):
    fields = made[line].split("\t")
    fields[column] = text
    return [*made[:line], "\t".join(fields), *made[line + 1 :]]


DAMAGE = {
    "a label": (lambda made: replaced(made, 7, 0, "2"), "column 1 is the label", 8, b"2"),
    "a number": (lambda made: replaced(made, 11, 4, "12x"), "column 5 is a number", 12, b"12x"),
    "no finite number": (lambda made: replaced(made, 3, 13, "inf"), "column 14 is a number", 4, b"inf"),
    "a category": (lambda made: replaced(made, 0, 14, "68fd1g64"), "column 15 is a category", 1, b"68fd1g64"),
    "a long category": (lambda made: replaced(made, 5, 39, "0123456789"), "column 40 is a category", 6, b"0123456789"),
    "a longer one": (lambda made: replaced(made, 5, 30, "a" * 40), "column 31 is a category", 6, b"a" * 40),
    "a carriage return": (lambda made: replaced(made, 9, 39, "0a0b0c\r"), "column 40", 10, b"0a0b0c\r"),
    "a byte 0": (lambda made: replaced(made, 9, 20, "0a\0b"), "holds the byte 0", 10, None),
    "a cut line": (lambda made: [*made[:19], made[19][:30]], "columns in place of 40", 20, None),
    "an empty line": (lambda made: [*made[:4], "", *made[4:]], "1 columns in place of 40", 5, b""),
    "no labels": (lambda made: [line.split("\t", 1)[1] for line in made], "it has no label", 1, None),
    "another text": (lambda made: ["a,b,c"] * 3, "1 columns", 1, b"a,b,c"),
    "no lines at all": (lambda made: ["x" * 10_000], "longer than 4096", 1, None),
}


@pytest.mark.parametrize("part_bytes", [700, 1 << 22])
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_names_the_line(tmp_path, monkeypatch, name, part_bytes):
    monkeypatch.setattr(_criteo_text, "PART_BYTES", part_bytes)
    damage, said, line, value = DAMAGE[name]
    if name == "no lines at all":
        said = "longer than 4096|1 columns"  # within one part it is a line like others
    file = write(tmp_path, damage(lines(20)))
    with pytest.raises(DataError, match=said) as caught:
        load_criteo(file)
    assert caught.value.place == f"{file}, line {line}" and "train.txt" in caught.value.remedy
    assert value is None or caught.value.value == value


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"clicked": None}, "no array 'clicked'"),
        ({"ids": np.zeros((30, 25), np.int32)}, r"ids has another shape.*(?s:.)*int32\[30, 25\]"),
        ({"ids": np.zeros((30, 26), np.float32)}, "ids has another shape or type"),
        (
            {"values": np.full((30, 13), np.nan, np.float32)},
            r"missing number is written as 0: 390 of 390(?s:.)*row 0, column 0",
        ),
        ({"ids": np.eye(30, 26, dtype=np.int32) * -1}, r"numbered from 0(?s:.)*row 0, column 0"),
        ({"clicked": np.arange(30, dtype=np.int8)}, r"1 is a click(?s:.)*row 2 "),
        ({"clicked": np.array(1)}, "another shape or type than 0 rows"),
        ({"ids": np.full((30, 26), None)}, "damaged archive"),  # pickled
    ],
)
def test_foreign_arrays_are_named(tmp_path, change, said):
    ids, values, labels = expected(lines(30), 40)
    arrays = {
        "ids": ids.astype(np.int32),
        "values": values.astype(np.float32),
        "clicked": labels.astype(np.int8),
        **change,
    }
    np.savez(tmp_path / "rows.npz", **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(DataError, match=said) as caught:
        load_criteo(tmp_path / "rows.npz")
    assert "rows.npz" in caught.value.place and caught.value.remedy


def test_an_array_that_is_said_to_be_longer_than_its_file_takes_no_memory(tmp_path):
    ids, values, labels = expected(lines(30), 40)
    path = tmp_path / "rows.npz"
    np.savez(path, ids=ids, values=values, clicked=labels)
    data = bytearray(path.read_bytes())
    entry = data.index(b"PK\x01\x02")  # of the first array, in the archive's table
    data[entry + 20 : entry + 24] = (1 << 30).to_bytes(4, "little")
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="said to take 1073741824 bytes"):
            load_criteo(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_empty_lines_take_no_rows(tmp_path):
    path = tmp_path / "train.txt.gz"
    path.write_bytes(gzip.compress(lines(1)[0].encode() + b"\n" * 100_000))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="a line has 1 columns in place of 40"):
            load_criteo(path)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20  # rows of all lines take 16 MB
    finally:
        tracemalloc.stop()


def test_files_that_are_not_there_or_damaged(tmp_path):
    for path, said in ((tmp_path / "absent", "cannot be read"), (tmp_path, "no file of Criteo's data")):
        with pytest.raises(DataError, match=said):
            load_criteo(path)
    (tmp_path / "cut.gz").write_bytes(gzip.compress("\n".join(lines(20)).encode())[:-20])
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04" + bytes(100))
    for name, said in (("cut.gz", "damaged gzip"), ("cut.npz", "damaged archive")):
        with pytest.raises(DataError, match=said):
            load_criteo(tmp_path / name)
    write(tmp_path, lines(1), "one.txt")
    with pytest.raises(DataError, match="too few rows"):
        load_criteo(tmp_path / "one.txt")
    with pytest.raises(DataError, match="several files"):
        load_criteo(tmp_path)
    with pytest.raises(DataError, match="at least two rows"):
        load_criteo(tmp_path / "one.txt", rows=1)
