"""CIFAR-10's binary and Python formats and archives, in files made here byte by byte."""

import io
import os
import pickle
import re
import struct
import tarfile

import numpy as np
import pytest

from splitjax.data import FileRows, load_cifar10
from splitjax.data._archive import write_sums
from splitjax.data._cifar_pickle import read_pickle
from splitjax.data.cifar10 import PYTHON_FILES, PYTHON_FOLDER, RECORD_BYTES, TEST_FILES, TRAIN_FILES, open_records
from splitjax.errors import DataError


def record(label, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, 3072, dtype=np.uint8)
    return bytes([label]) + pixels.tobytes()


@pytest.fixture
def folder(tmp_path):
    """Files of 1 to 6 records; the label of a record is the number of its file."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for number, name in enumerate(TRAIN_FILES + TEST_FILES, start=1):
        (folder / name).write_bytes(b"".join(record(number, seed) for seed in range(number)))
    return folder


def test_files_of_any_number_of_records_are_read(folder):
    dataset = load_cifar10(folder)
    assert dataset.train["image"].shape == (15, 32, 32, 3) and dataset.train["image"].dtype == np.uint8
    assert dataset.train["label"].tolist() == [1] + [2] * 2 + [3] * 3 + [4] * 4 + [5] * 5
    assert dataset.test["label"].tolist() == [6] * 6 and dataset.test["label"].dtype == np.int32
    assert dataset.num_classes == 10 and dataset.class_names[6] == "frog"


def test_pixels_are_planes_of_rows(tmp_path):
    # red counts rows, green counts columns, blue is constant
    row, column = np.mgrid[:32, :32].astype(np.uint8)
    planes = np.stack([row, column, np.full((32, 32), 200, np.uint8)])
    (tmp_path / "one.bin").write_bytes(bytes([9]) + planes.tobytes())
    images, labels = open_records([tmp_path / "one.bin"])
    assert labels.tolist() == [9]
    assert images[0][3, 17].tolist() == [3, 17, 200]
    np.testing.assert_array_equal(images[0], planes.transpose(1, 2, 0))


def test_batches_are_standardised(folder):
    dataset = load_cifar10(folder)
    *_, last = dataset.test_batches(4)
    assert last["mask"].tolist() == [1, 1, 0, 0]
    expected = (dataset.test["image"][5] / 255 - np.array(dataset.transform.mean)) / np.array(dataset.transform.std)
    np.testing.assert_allclose(last["image"][1], expected, atol=1e-5)


def test_the_folder_around_the_archive_will_do(folder):
    assert len(load_cifar10(folder.parent).test["label"]) == 6
    assert len(load_cifar10(str(folder)).test["label"]) == 6


@pytest.mark.parametrize("extra", [1, 3072])
def test_a_truncated_file_names_file_size_offset_and_remedy(folder, extra):
    file = folder / "data_batch_3.bin"
    size = 2 * RECORD_BYTES + extra
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(DataError) as caught:
        load_cifar10(folder)
    text = str(caught.value)
    assert f"{size} bytes" in text and f"byte offset {2 * RECORD_BYTES} has {extra} bytes" in text
    assert caught.value.value == size and str(file) in caught.value.place
    assert "https://" in caught.value.remedy


def test_an_empty_file_is_an_error(folder):
    (folder / "test_batch.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"truncated[\s\S]*test_batch.bin, byte offset 0"):
        load_cifar10(folder)


def test_a_wrong_label_names_its_record(folder):
    (folder / "data_batch_2.bin").write_bytes(record(9) + record(10) + record(255))
    with pytest.raises(DataError, match=r"record 1 .* label 10") as caught:
        load_cifar10(folder)
    assert caught.value.value == 10
    assert "2 of 3 records are wrong" in str(caught.value)
    assert caught.value.place.endswith(f"data_batch_2.bin, record 1 (counted from 0), byte offset {RECORD_BYTES}")
    assert "CIFAR-100" in caught.value.remedy


def test_missing_files_are_all_named(folder):
    (folder / "data_batch_2.bin").unlink()
    (folder / "test_batch.bin").unlink()
    with pytest.raises(DataError, match="missing: data_batch_2.bin, test_batch.bin") as caught:
        load_cifar10(folder)
    assert caught.value.value == ["data_batch_2.bin", "test_batch.bin"]
    assert str(folder) == caught.value.place and "cifar-10-binary.tar.gz" in caught.value.remedy


def test_a_missing_folder_or_file_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"no such folder[\s\S]*nowhere[\s\S]*download https"):
        load_cifar10(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"cannot be read[\s\S]*nothing.bin"):
        open_records([tmp_path / "nothing.bin"])


def test_a_changed_file_is_named_where_there_are_checksums(folder):
    write_sums(folder, TRAIN_FILES + TEST_FILES)
    assert load_cifar10(folder).num_train == 15
    file = folder / "data_batch_4.bin"
    contents = bytearray(file.read_bytes())
    contents[5000] ^= 1  # a pixel: the format itself cannot tell
    file.write_bytes(contents)
    with pytest.raises(DataError, match="damaged data file: data_batch_4.bin") as caught:
        load_cifar10(folder)
    assert caught.value.place == str(file) and "fetch it again" in caught.value.remedy
    assert load_cifar10(folder, verify=False).num_train == 15
    (folder / "SHA256SUMS").write_text("abc  data_batch_1.bin\n")
    with pytest.raises(DataError, match="damaged checksums: line 1"):
        load_cifar10(folder)


# --- the Python version -----------------------------------------------------------------------------------------------


def text2(value):
    """A text of Python 2 (bytes), as its pickler writes it: SHORT_BINSTRING or BINSTRING."""
    return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value


def python2_pickle(labels, pixels):
    """What Python 2's cPickle writes at protocol 2 for {"data": uint8[N, 3072], "labels": [...], "batch_label":
    ...}."""
    num, width = pixels.shape
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85" + text2(b"b") + b"\x87R"
    dtype = (
        b"cnumpy\ndtype\n"
        + text2(b"u1")
        + b"K\x00K\x01\x87R(K\x03"
        + text2(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    shape = b"M" + struct.pack("<H", num) + b"M" + struct.pack("<H", width) + b"\x86"
    state = b"(K\x01" + shape + dtype + b"\x89" + text2(pixels.tobytes()) + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    entries = (
        text2(b"data")
        + array
        + state
        + text2(b"labels")
        + numbers
        + text2(b"batch_label")
        + text2(b"training batch 1 of 5")
    )
    return b"\x80\x02}q\x00(" + entries + b"u."


def images_of(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


def test_the_handwritten_pickle_is_a_pickle():
    pixels = images_of(2)
    value = pickle.loads(python2_pickle([3, 4], pixels).replace(b"numpy.core", b"numpy._core"), encoding="bytes")
    np.testing.assert_array_equal(value[b"data"], pixels)
    assert value[b"labels"] == [3, 4]


@pytest.fixture
def python_folder(tmp_path):
    folder = tmp_path / PYTHON_FOLDER
    folder.mkdir()
    for number, name in enumerate(PYTHON_FILES, start=1):
        (folder / name).write_bytes(python2_pickle([number] * number, images_of(number, number)))
    return folder


def test_the_python_version_is_read(python_folder):
    dataset = load_cifar10(python_folder)
    assert dataset.train["label"].tolist() == [1] + [2] * 2 + [3] * 3 + [4] * 4 + [5] * 5
    assert dataset.train["label"].dtype == np.int32
    np.testing.assert_array_equal(dataset.train["image"][1], images_of(2, 2)[0].reshape(3, 32, 32).transpose(1, 2, 0))
    np.testing.assert_array_equal(load_cifar10(python_folder.parent).test["image"], dataset.test["image"])


def test_both_versions_give_the_same_and_the_binary_one_is_preferred(folder, python_folder):
    for number, name in enumerate(PYTHON_FILES, start=1):
        records = np.concatenate([np.full((number, 1), number, np.uint8), images_of(number, number)], axis=1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    ours, theirs = load_cifar10(folder.parent), load_cifar10(python_folder)
    assert isinstance(ours.train["image"], FileRows) and not isinstance(theirs.train["image"], FileRows)
    np.testing.assert_array_equal(np.asarray(ours.train["image"]), theirs.train["image"])
    np.testing.assert_array_equal(ours.test["label"], theirs.test["label"])


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_a_pickle_written_by_python_3_is_read(python_folder, protocol):
    pixels = np.asfortranarray(images_of(6, 6))
    (python_folder / "test_batch").write_bytes(pickle.dumps({b"data": pixels, b"labels": [6] * 6}, protocol))
    np.testing.assert_array_equal(
        load_cifar10(python_folder).test["image"][2], pixels[2].reshape(3, 32, 32).transpose(1, 2, 0)
    )


class Attack:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("attack", "name"),
    [
        (Attack(os.system, ("touch hacked",)), "posix.system"),
        (Attack(eval, ("open('hacked', 'w')",)), "builtins.eval"),
        (Attack(getattr, ("x", "upper")), "builtins.getattr"),
        (Attack(np.fromfile, ("x",)), "numpy.fromfile"),
        (Attack(np.dtype, ("O",)), None),  # nothing but a note: not an array
        (np.array([object()]), "builtins.object"),
        (np.float64(1), "numpy.*scalar"),
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_asks_for_more_than_arrays_is_refused(
    python_folder, attack, name, protocol, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    (python_folder / "test_batch").write_bytes(pickle.dumps({b"data": attack, b"labels": [1]}, protocol))
    with pytest.raises(DataError) as caught:
        load_cifar10(python_folder)
    if name is None:
        assert "'data' is no array" in str(caught.value)
    elif protocol:
        assert re.search(rf"asks for {name.replace('builtins', '(builtins|__builtin__)')}", str(caught.value))
        assert "was not run" in str(caught.value) and "test_batch" in caught.value.place
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([1], "a list in place of a dict"),
        ({b"data": images_of(2)}, "no list of whole numbers"),
        ({b"data": images_of(2), b"labels": [1]}, "2 images and 1 labels"),
        ({b"data": images_of(2).astype(np.float32), b"labels": [1, 2]}, "no array"),
        ({b"data": images_of(2)[:, :3000], b"labels": [1, 2]}, "no array"),
        ({b"data": images_of(2), b"labels": [1, 10]}, "record 1 .* label 10"),
        ({b"data": images_of(2), b"labels": [1, -1]}, "record 1 .* label -1"),
        ({b"data": images_of(2), b"labels": [1, 1 << 70]}, "above 64 bits"),
    ],
)
def test_a_pickle_of_something_else_is_an_error(python_folder, value, reason):
    (python_folder / "data_batch_3").write_bytes(pickle.dumps(value, 4))
    with pytest.raises(DataError, match=reason) as caught:
        load_cifar10(python_folder)
    assert "data_batch_3" in caught.value.place


def test_a_truncated_pickle_is_an_error_wherever_it_ends(python_folder):
    file = python_folder / "data_batch_2"
    whole = file.read_bytes()
    for size in [*range(0, 200, 7), 3000, len(whole) - 1]:
        file.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"damaged or truncated pickle[\s\S]*data_batch_2, byte offset \d+ of"):
            load_cifar10(python_folder)
    file.write_bytes(whole + b"..")
    with pytest.raises(DataError, match="2 bytes follow the pickle's end"):
        load_cifar10(python_folder)


def test_flipped_bits_of_a_pickle_never_pass_as_something_else():
    whole = python2_pickle([3, 4], images_of(2))
    outcomes = []
    for bit in range(8 * whole.index(images_of(2).tobytes())):
        contents = bytearray(whole)
        contents[bit // 8] ^= 1 << bit % 8
        try:
            outcomes.append(read_pickle(bytes(contents), "here")[0].shape == (2, 3072))
        except DataError:
            outcomes.append(None)
    # a bit in what is skipped over, such as the array's name for itself, harms nothing
    assert False not in outcomes and outcomes.count(None) > len(outcomes) / 2


def test_a_few_bytes_cannot_ask_for_much_memory():
    with pytest.raises(DataError, match="note 2147483647 where there are at most 2"):
        read_pickle(b"\x80\x02}r\xff\xff\xff\x7f.", "here")


# --- archives ---------------------------------------------------------------------------------------------------------


def archive_of(folder, file, mode="w:gz"):
    with tarfile.open(file, mode) as tar:
        tar.add(folder, folder.name)
    return file


@pytest.mark.parametrize("mode", ["w:gz", "w"])
def test_an_archive_is_read_without_unpacking(folder, python_folder, tmp_path, mode):
    (folder / "readme.html").write_text("no data")
    for source, reference in ((folder, load_cifar10(folder)), (python_folder, load_cifar10(python_folder))):
        before = sorted(tmp_path.rglob("*"))
        archive = archive_of(source, tmp_path / "cifar.tar.gz", mode)
        dataset = load_cifar10(archive)
        np.testing.assert_array_equal(dataset.train["image"], np.asarray(reference.train["image"]))
        np.testing.assert_array_equal(dataset.test["label"], reference.test["label"])
        archive.unlink()
        assert sorted(tmp_path.rglob("*")) == before


def test_an_archive_that_lacks_a_file_or_holds_other_things_is_an_error(folder, tmp_path):
    (folder / "data_batch_5.bin").unlink()
    with pytest.raises(DataError, match="missing: data_batch_5.bin"):
        load_cifar10(archive_of(folder, tmp_path / "a.tar.gz"))
    (tmp_path / "b.tar.gz").write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match="damaged archive"):
        load_cifar10(tmp_path / "b.tar.gz")


def test_a_damaged_archive_is_an_error_wherever_the_damage_is(folder, tmp_path):
    archive = archive_of(folder, tmp_path / "a.tar.gz")
    whole = archive.read_bytes()
    for size in (1, 20, len(whole) // 2, len(whole) - 5):
        archive.write_bytes(whole[:size])
        with pytest.raises(DataError, match="damaged archive"):
            load_cifar10(archive)
    for byte in range(24, len(whole), len(whole) // 40):  # the first ones hold the time and the name
        contents = bytearray(whole)
        contents[byte] ^= 255  # of its last byte gzip may use a single bit
        archive.write_bytes(contents)
        with pytest.raises(DataError):
            load_cifar10(archive)


def test_a_wrong_label_in_an_archive_names_its_record(folder, tmp_path):
    (folder / "data_batch_2.bin").write_bytes(record(9) + record(10))
    with pytest.raises(DataError, match="record 1 .* label 10") as caught:
        load_cifar10(archive_of(folder, tmp_path / "a.tar.gz"))
    assert "data_batch_2.bin" in caught.value.place


def test_a_link_in_an_archive_is_refused(folder, tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        member = tarfile.TarInfo(f"{folder.name}/data_batch_1.bin")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(member, io.BytesIO())
    with pytest.raises(DataError, match="a link or a device"):
        load_cifar10(tmp_path / "a.tar")
