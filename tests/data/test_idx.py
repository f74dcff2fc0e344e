"""IDX files as MNIST's, made here byte by byte."""

import gzip
import struct

import numpy as np
import pytest

from splitjax.data import FileRows, load_idx
from splitjax.data._archive import write_sums
from splitjax.data.idx import TYPES, read_idx
from splitjax.errors import DataError

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx(array, code=0x08):
    array = np.asarray(array)
    return (
        bytes([0, 0, code, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.astype(TYPES[code]).tobytes()
    )


def images_of(num, size=28):
    return np.random.default_rng(num).integers(0, 256, (num, size, size), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "mnist"
    folder.mkdir()
    for prefix, num in (("train", 12), ("t10k", 5)):
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx(images_of(num)))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(np.arange(num) % 10))
    return folder


def test_the_official_files_are_read(folder):
    dataset = load_idx(folder)
    assert repr(dataset) == "Dataset('mnist', 12 train, 5 test, 10 classes)"
    np.testing.assert_array_equal(np.asarray(dataset.train["image"]), images_of(12)[..., None])
    assert dataset.train["label"].tolist() == [*range(10), 0, 1] and dataset.train["label"].dtype == np.int32
    assert isinstance(dataset.test["image"], FileRows) and dataset.test["image"].shape == (5, 28, 28, 1)
    pixels = images_of(12) / 255
    np.testing.assert_allclose(
        dataset.transform.mean + dataset.transform.std, [pixels.mean(), pixels.std()], rtol=1e-12
    )
    (batch,) = dataset.train_batches(12)
    assert (
        batch["image"].dtype == np.float32
        and abs(batch["image"].mean()) < 1e-5
        and abs(batch["image"].std() - 1) < 1e-5
    )
    assert not dataset.augmentation.flip
    assert load_idx(folder.parent).num_train == 12


@pytest.mark.parametrize("packed", [NAMES, NAMES[:1], NAMES[1:3]])
def test_packed_files_give_the_same(folder, packed):
    plain = load_idx(folder, image_size=32, channels=3)
    for name in packed:
        (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))
        (folder / name).unlink()
    dataset = load_idx(folder, image_size=32, channels=3)
    for split in ("train", "test"):
        for name in ("image", "label"):
            np.testing.assert_array_equal(
                np.asarray(getattr(dataset, split)[name]), np.asarray(getattr(plain, split)[name])
            )
    assert dataset.transform == plain.transform


def test_images_become_those_of_other_models(folder):
    dataset = load_idx(folder, image_size=32, channels=3)
    images = np.asarray(dataset.train["image"])
    assert images.shape == dataset.train["image"].shape == (12, 32, 32, 3)
    for channel in range(3):
        np.testing.assert_array_equal(images[:, 2:30, 2:30, channel], images_of(12))
    images[:, 2:30, 2:30] = 0
    assert not images.any()
    assert len(dataset.transform.mean) == 3
    with pytest.raises(DataError, match="28x28 pixels are only enlarged"):
        load_idx(folder, image_size=16)


@pytest.mark.parametrize("rename", ["emnist-digits-{}", "{}.dot"])
def test_the_names_of_sets_made_alike_are_found(folder, rename):
    for name in NAMES:
        new = rename.format(name) if "dot" not in rename else name.replace("-idx", ".idx")
        (folder / name).rename(folder / new)
    assert load_idx(folder).num_test == 5


@pytest.mark.parametrize("code", list(TYPES))
def test_every_type_and_any_dims_are_read(tmp_path, code):
    values = np.arange(24).reshape(2, 3, 4)
    (tmp_path / "a").write_bytes(idx(values, code))
    read = read_idx(tmp_path / "a")
    assert read.dtype == np.dtype(TYPES[code]).newbyteorder("=") and read.dtype.isnative
    np.testing.assert_array_equal(read, values)


@pytest.mark.parametrize("magic", [b"\0\0\x08", b"\0\1\x08\3", b"\0\0\x07\3", b"\0\0\x08\0", b"\x1f\x8b\x08\0", b""])
def test_a_wrong_magic_number_is_an_error(folder, magic):
    file = folder / NAMES[0]
    file.write_bytes(magic + (file.read_bytes()[4:] if len(magic) == 4 else b""))
    with pytest.raises(DataError, match="not an IDX file") as caught:
        load_idx(folder)
    assert caught.value.place == f"{file}, byte offset 0" and caught.value.value == magic.hex(" ")
    assert (".gz" in caught.value.remedy) == magic.startswith(b"\x1f")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_of_another_length_than_its_dims_say_is_an_error(folder, name, packed):
    file, whole = folder / name, (folder / name).read_bytes()
    header = 16 if "images" in name else 8

    def write(contents):
        if packed:
            file.unlink(missing_ok=True)
            file.with_name(f"{name}.gz").write_bytes(gzip.compress(contents))
        else:
            file.write_bytes(contents)

    for size in (header - 3, header, len(whole) - 1):
        write(whole[:size])
        with pytest.raises(DataError, match="truncated") as caught:
            load_idx(folder)
        assert (
            name in caught.value.place
            and caught.value.place.endswith(f"byte offset {size}")
            and caught.value.value == size
        )
    write(whole + b"\0")
    with pytest.raises(DataError, match="too long") as caught:
        load_idx(folder)
    assert caught.value.place.endswith(f"byte offset {len(whole)}")


def test_a_damaged_dim_is_noticed_and_no_memory_set_aside_for_it(folder):
    file = folder / NAMES[1]
    whole = file.read_bytes()
    for bit in range(32, 64):
        contents = bytearray(whole)
        contents[bit // 8] ^= 1 << bit % 8
        file.write_bytes(contents)
        with pytest.raises(DataError, match="truncated|too long"):
            load_idx(folder)


def test_a_damaged_packed_file_is_an_error(folder):
    file = folder / f"{NAMES[0]}.gz"
    whole = gzip.compress((folder / NAMES[0]).read_bytes(), mtime=0)
    (folder / NAMES[0]).unlink()
    for size in (5, len(whole) // 2, len(whole) - 4):
        file.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"damaged \.gz[\s\S]*bytes unpacked"):
            load_idx(folder)
    unused = 0
    for byte in range(10, len(whole), len(whole) // 30):
        contents = bytearray(whole)
        contents[byte] ^= 16
        file.write_bytes(contents)
        try:
            images = load_idx(folder).train["image"]
        except DataError:
            continue
        np.testing.assert_array_equal(images, images_of(12)[..., None])  # a bit that gzip does not use
        unused += 1
    assert unused < 5


def test_counts_labels_and_kinds_have_to_fit(folder):
    labels = folder / NAMES[3]
    labels.write_bytes(idx([1, 2, 3, 4]))
    with pytest.raises(DataError, match="5 images and 4 labels") as caught:
        load_idx(folder)
    assert NAMES[2] in caught.value.place and NAMES[3] in caught.value.place
    labels.write_bytes(idx([1, 2, 3, 4, 26]))
    with pytest.raises(DataError, match="label 26 is none of the 10 classes") as caught:
        load_idx(folder)
    assert "label 4 (counted from 0), byte offset 12" in caught.value.place and "num_classes=27" in caught.value.remedy
    assert load_idx(folder, num_classes=27).num_classes == 27
    labels.write_bytes(idx(np.zeros(5), 0x0D))
    with pytest.raises(DataError, match="labels are whole numbers"):
        load_idx(folder)
    (folder / NAMES[2]).write_bytes(idx(images_of(5), 0x0B))
    with pytest.raises(DataError, match="images are unsigned bytes"):
        load_idx(folder)


def test_missing_and_ambiguous_files_are_named(folder):
    with pytest.raises(DataError, match="no such folder"):
        load_idx(folder / "none")
    (folder / f"other-{NAMES[0]}").write_bytes(b"")
    with pytest.raises(DataError, match="several files of train images"):
        load_idx(folder)
    for name in (f"other-{NAMES[0]}", NAMES[0], NAMES[3]):
        (folder / name).unlink()
    with pytest.raises(DataError, match=f"missing: {NAMES[0]}, {NAMES[3]}"):
        load_idx(folder)


def test_a_changed_pixel_is_noticed_where_there_are_checksums(folder):
    write_sums(folder, NAMES)
    load_idx(folder)
    with open(folder / NAMES[0], "r+b") as file:
        file.seek(1000)
        file.write(b"\xaa\xab")
    with pytest.raises(DataError, match=f"damaged data file: {NAMES[0]}"):
        load_idx(folder)
    load_idx(folder, verify=False)
