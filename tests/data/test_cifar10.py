"""CIFAR-10's binary format, in files made here byte by byte."""

import pickle

import numpy as np
import pytest

from splitjax.data import load_cifar10
from splitjax.data.cifar10 import FOLDER, PYTHON_FILES, PYTHON_FOLDER, RECORD_BYTES, TEST_FILES, TRAIN_FILES, open_records
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
