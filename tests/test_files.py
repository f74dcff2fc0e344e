"""Files that are whole or not there."""

from __future__ import annotations

import gzip
import os
import tracemalloc

import pytest

from splitjax._files import replace_atomically, unpack, unpacked_limit, write_atomically


def test_a_file_is_the_old_one_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "a.json"
    write_atomically(path, "old")

    def write(scratch):
        assert scratch.suffix == ".json" and path.read_text() == "old"
        scratch.write_text("half")
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        replace_atomically(path, write)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.json"]
    write_atomically(path, "new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["a.json"]


def test_links_are_followed_and_what_is_no_file_is_written_to(tmp_path):
    link, read_end = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(tmp_path / "target")
    write_atomically(link, "text")
    assert link.is_symlink() and (tmp_path / "target").read_text() == "text"
    os.mkfifo(read_end)
    reader = os.open(read_end, os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(read_end, "text")
    assert os.read(reader, 10) == b"text" and read_end.is_fifo()
    os.close(reader)


def test_what_unpacks_to_too_much_is_given_up_before_it_takes_the_memory():
    """64 MiB of zeros pack to a thousandth."""
    packed = gzip.compress(bytes(64 << 20))
    limit = unpacked_limit(len(packed))
    assert limit < 32 << 20
    tracemalloc.start()
    with pytest.raises(OSError, match=f"unpack to more than {limit}"):
        unpack(packed)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < limit + (2 << 20)
    assert unpack(gzip.compress(b"text")) == b"text"
