"""Fetching: what comes over the network is checked, unpacked without trust, and put in place whole or not at all."""

import dataclasses
import functools
import gzip
import hashlib
import http.server
import io
import os
import pathlib
import socket
import tarfile
import threading

import numpy as np
import pytest

from splitjax.data import fetch, load_cifar10, load_idx
from splitjax.data._archive import read_sums
from splitjax.data.cifar10 import FOLDER, RECORD_BYTES, TEST_FILES, TRAIN_FILES
from splitjax.data.fetching import SOURCES, Download, Source, fetch_source
from splitjax.errors import DataError

FILES = TRAIN_FILES + TEST_FILES


def records(number, count=3):
    return b"".join(bytes([number]) + bytes([number * 16 + row]) * 3072 for row in range(count))


def archive(*changes, files=FILES, folder=FOLDER):
    """An archive as the official one, and members before it: (TarInfo, contents)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for member, contents in changes:
            member.size = len(contents)
            tar.addfile(member, io.BytesIO(contents))
        top = tarfile.TarInfo(folder)
        top.type = tarfile.DIRTYPE
        tar.addfile(top)
        for number, name in enumerate((*files, "readme.html"), start=1):
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = 3 * RECORD_BYTES
            tar.addfile(member, io.BytesIO(records(number)))
    return out.getvalue()


@pytest.fixture
def served(tmp_path):
    """A folder that a server on this machine serves; with it a list of what was asked for."""
    folder = tmp_path / "served"
    folder.mkdir()
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *args):
            pass

        def do_GET(self):
            asked.append(self.path)
            super().do_GET()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_address[1]}", asked
    server.shutdown()
    thread.join()
    server.server_close()


def offer(served, contents, **more):
    """A source whose archive is served, with the checksum of `contents`."""
    folder, url, _ = served
    (folder / "cifar.tar.gz").write_bytes(contents)
    sizes = dict.fromkeys(FILES, 3 * RECORD_BYTES)
    return Source(
        FOLDER,
        (Download(f"{url}/cifar.tar.gz", len(contents), hashlib.sha256(contents).hexdigest(), sizes, FOLDER, **more),),
    )


def listing(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def refused(source, tmp_path, match):
    """Fetching fails and leaves nothing at all."""
    with pytest.raises(DataError, match=match) as caught:
        fetch_source(source, tmp_path / "data", timeout_seconds=5)
    assert listing(tmp_path / "data") == []
    return caught.value


def test_an_archive_is_fetched_once_checked_and_can_be_loaded(served, tmp_path):
    source, seen = offer(served, archive()), []
    folder = fetch_source(source, tmp_path / "new" / "data", progress=lambda *args: seen.append(args))
    assert folder == tmp_path / "new" / "data" / FOLDER
    assert listing(folder.parent) == sorted([FOLDER, *(f"{FOLDER}/{name}" for name in (*FILES, "SHA256SUMS"))])
    dataset = load_cifar10(folder)
    assert dataset.train["label"].tolist() == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3 + [5] * 3
    assert seen[-1] == ("cifar.tar.gz", source.downloads[0].size_bytes, source.downloads[0].size_bytes)
    assert read_sums(folder)["test_batch.bin"] == hashlib.sha256(records(6)).hexdigest()
    assert fetch_source(source, folder.parent) == folder
    assert len(served[2]) == 1  # asked for once


def test_all_workers_of_a_run_may_fetch_at_once_and_one_download_serves_them(served, tmp_path):
    source, found = offer(served, archive()), []
    workers = [threading.Thread(target=lambda: found.append(fetch_source(source, tmp_path / "data"))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == [tmp_path / "data" / FOLDER] * 4 and len(served[2]) == 1
    assert listing(tmp_path / "data")[0] == FOLDER  # nothing lies beside it


def test_a_file_damaged_since_is_named_and_not_overwritten(served, tmp_path):
    source = offer(served, archive())
    folder = fetch_source(source, tmp_path / "data")
    (folder / "data_batch_2.bin").write_bytes(records(2, 2) + records(3, 1))
    for again in (lambda: fetch_source(source, tmp_path / "data"), lambda: load_cifar10(folder)):
        with pytest.raises(DataError, match="damaged data file: data_batch_2.bin"):
            again()
    assert len(served[2]) == 1


def test_what_is_there_stays_and_what_lacks_is_added(served, tmp_path):
    folder = tmp_path / "data" / FOLDER
    folder.mkdir(parents=True)
    (folder / "data_batch_1.bin").write_bytes(records(9, 1))
    fetch_source(offer(served, archive()), tmp_path / "data")
    assert (folder / "data_batch_1.bin").read_bytes() == records(9, 1)
    assert set(read_sums(folder)) == set(FILES) - {"data_batch_1.bin"}
    assert load_cifar10(folder).train["label"].tolist()[:3] == [9, 2, 2]
    (folder / "data_batch_3.bin").unlink()
    fetch_source(offer(served, archive()), tmp_path / "data")
    assert (folder / "data_batch_3.bin").read_bytes() == records(3)
    assert set(read_sums(folder)) == set(FILES) - {"data_batch_1.bin"}
    assert listing(tmp_path / "data") == sorted([FOLDER, *(f"{FOLDER}/{name}" for name in (*FILES, "SHA256SUMS"))])


def test_a_tampered_download_is_refused(served, tmp_path):
    contents = archive()
    source = offer(served, contents)
    served_file = served[0] / "cifar.tar.gz"
    changed = bytearray(contents)
    changed[len(changed) // 2] ^= 1
    for wrong, match in (
        (changed, "its SHA-256 is"),
        (contents[:-1], f"it has {len(contents) - 1} of {len(contents)} bytes"),
        (contents + b"\0", f"it has more than {len(contents)} bytes"),
        (b"<html>log in first</html>", "it has 25 of"),
    ):
        served_file.write_bytes(wrong)
        error = refused(source, tmp_path, f"not the official file: {match}")
        assert error.place == source.downloads[0].url and source.downloads[0].sha256 in error.remedy


def link(kind, target):
    member = tarfile.TarInfo(f"{FOLDER}/data_batch_1.bin")
    member.type, member.linkname = kind, target
    return member


@pytest.mark.parametrize(
    ("member", "match"),
    [
        (tarfile.TarInfo("../outside"), "leads out of its folder"),
        (tarfile.TarInfo(f"{FOLDER}/../../outside"), "leads out of its folder"),
        (link(tarfile.SYMTYPE, "/etc/passwd"), "a link or a device"),
        (link(tarfile.SYMTYPE, "test_batch.bin"), "a link or a device"),
        (link(tarfile.LNKTYPE, "/etc/passwd"), "a link or a device"),
        (link(tarfile.FIFOTYPE, ""), "a link or a device"),
        (link(tarfile.CHRTYPE, ""), "a link or a device"),
    ],
)
def test_an_archive_with_a_member_that_reaches_out_is_refused(served, tmp_path, member, match):
    # with the right checksum: as if the official archive had been replaced
    error = refused(offer(served, archive((member, b""))), tmp_path, match)
    assert member.name in error.place
    assert not (tmp_path / "outside").exists() and not (tmp_path.parent / "outside").exists()


def test_an_absolute_name_is_not_written_to(served, tmp_path):
    fetch_source(offer(served, archive((tarfile.TarInfo(str(tmp_path / "outside")), b"x"))), tmp_path / "data")
    assert not (tmp_path / "outside").exists()
    assert len(listing(tmp_path / "data")) == len(FILES) + 2


def test_an_archive_that_unpacks_to_too_much_is_refused(served, tmp_path):
    bomb = archive((tarfile.TarInfo(f"{FOLDER}/zeros"), bytes(8 << 20)))
    assert len(bomb) < 100_000
    refused(offer(served, bomb), tmp_path, "unpacks to more than")
    large = archive((tarfile.TarInfo(f"{FOLDER}/data_batch_1.bin"), bytes(3 * RECORD_BYTES + 1)))
    refused(offer(served, large), tmp_path, f"data_batch_1.bin has {3 * RECORD_BYTES + 1} bytes")
    many = archive(*((tarfile.TarInfo(f"{FOLDER}/{number}"), b"") for number in range(1001)))
    refused(offer(served, many), tmp_path, "more than 1000 members")


def test_an_archive_with_a_file_of_holes_is_refused(served, tmp_path):
    holes = tarfile.TarInfo(f"{FOLDER}/data_batch_1.bin")
    sparse = {"major": "1", "minor": "0", "realsize": str(1 << 40), "name": holes.name}
    holes.pax_headers = {f"GNU.sparse.{key}": value for key, value in sparse.items()}
    refused(offer(served, archive((holes, b"0\n".ljust(512, b"\0")))), tmp_path, "a sparse file")


def test_an_archive_that_is_none_or_lacks_a_file_is_refused(served, tmp_path):
    refused(offer(served, b"nothing of the kind"), tmp_path, "damaged archive")
    refused(offer(served, archive()[:-30]), tmp_path, "damaged archive")
    refused(offer(served, archive(files=FILES[:-1])), tmp_path, "it lacks test_batch.bin")


def test_packed_files_are_fetched_one_by_one(served, tmp_path):
    folder, url, asked = served
    downloads = []
    for name, number, header in (
        ("train-images-idx3-ubyte", 2, [0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0, 4]),
        ("train-labels-idx1-ubyte", 2, [0, 0, 8, 1, 0, 0, 0, 2]),
        ("t10k-images-idx3-ubyte", 1, [0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 4, 0, 0, 0, 4]),
        ("t10k-labels-idx1-ubyte", 1, [0, 0, 8, 1, 0, 0, 0, 1]),
    ):
        contents = bytes(header) + bytes([number] * number * (16 if "images" in name else 1))
        packed = gzip.compress(contents)
        (folder / f"{name}.gz").write_bytes(packed)
        downloads.append(
            Download(f"{url}/{name}.gz", len(packed), hashlib.sha256(packed).hexdigest(), {name: len(contents)})
        )
    source = Source("mnist", tuple(downloads))
    dataset = load_idx(fetch_source(source, tmp_path / "data"))
    assert (
        dataset.train["label"].tolist() == [2, 2] and dataset.test["image"][0].tolist() == np.ones((4, 4, 1)).tolist()
    )
    (tmp_path / "data/mnist/t10k-labels-idx1-ubyte").unlink()
    fetch_source(source, tmp_path / "data")
    assert asked[4:] == ["/t10k-labels-idx1-ubyte.gz"]  # only what lacks
    # a small file that unpacks to another size, a bomb for instance
    for size in (17, 15):
        wrong = Source("mnist", (dataclasses.replace(downloads[1], files={"train-labels-idx1-ubyte": size}),))
        with pytest.raises(DataError, match=f"train-labels-idx1-ubyte is not of {size} bytes"):
            fetch_source(wrong, tmp_path / "other")
        assert listing(tmp_path / "other") == []


def test_without_a_network_the_remedy_is_a_folder(served, tmp_path):
    source = offer(served, archive())
    (served[0] / "cifar.tar.gz").unlink()
    error = refused(source, tmp_path, "the download failed: HTTP Error 404")
    assert f"--data-dir {FOLDER}" in error.remedy
    nobody = dataclasses.replace(source.downloads[0], url="http://127.0.0.1:9/cifar.tar.gz")
    refused(Source(FOLDER, (nobody,)), tmp_path, "the download failed: .*refused")
    unknown = dataclasses.replace(source.downloads[0], url="nowhere.tar.gz")
    refused(Source(FOLDER, (unknown,)), tmp_path, "the download failed: unknown url type")


def test_a_server_that_falls_silent_is_given_up(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        download = Download(f"http://127.0.0.1:{silent.getsockname()[1]}/a.gz", 5, "0" * 64, {"a": 3})
        with pytest.raises(DataError, match="the download failed: timed out"):
            fetch_source(Source("a", (download,)), tmp_path / "data", timeout_seconds=0.2)


def test_an_interrupted_download_leaves_nothing(served, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_source(offer(served, archive()), tmp_path / "data", progress=interrupt)
    assert listing(tmp_path / "data") == []


def test_a_folder_that_cannot_be_written_to_is_an_error(served, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written") as caught:
        fetch_source(offer(served, archive()), tmp_path / "file")
    assert caught.value.place == str(tmp_path / "file")


def test_an_unknown_name_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"no such data set to fetch[\s\S]*cifar10, cifar10-python, mnist"):
        fetch("imagenet", tmp_path)


def test_the_official_sources_are_complete():
    for source in SOURCES.values():
        for download in source.downloads:
            assert len(bytes.fromhex(download.sha256)) == 32 and download.url.startswith("https://")
            assert pathlib.PurePath(download.file_name).suffix == ".gz"
    assert set(SOURCES["cifar10"].files) == set(FILES) and set(SOURCES["cifar10"].files.values()) == {30_730_000}


@pytest.mark.network
@pytest.mark.parametrize(
    ("name", "load", "sizes"),
    [
        ("mnist", load_idx, (60_000, 10_000)),
        ("cifar10", load_cifar10, (50_000, 10_000)),
        ("cifar10-python", load_cifar10, (50_000, 10_000)),
    ],
)
def test_the_official_files_are_fetched(tmp_path, name, load, sizes):
    folder = fetch(name, os.environ.get("SPLITJAX_TEST_DATA", tmp_path))
    dataset = load(folder)
    assert (dataset.num_train, dataset.num_test) == sizes
    assert np.bincount(dataset.test["label"]).min() >= 892
