"""Valid inputs of every format, from which the search begins: documents of the tests, and small files made here."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pathlib
import pickle
import struct
import tarfile
from collections.abc import Callable, Sequence

import numpy as np

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_DOCUMENTS = _ROOT / "tests" / "codec" / "data"

PHILLY = """timestamp,duration,num_gpus,gpu_time,cluster
2017-10-09 06:13:33,100.0,4,400.0,b
2017-10-09 06:13:03,2951.0,1,2951.0,a
"""
MURI = """job_id,num_gpu,submit_time,iterations,model_name,iteration_time,resource_time_0,resource_time_1,\
resource_time_2
0,8,0,10956,gpt2,437,0.6,419,49
1,8,1534000,1463,vgg16,214,82,75,66
"""
JOBS = "name,arrival_seconds,num_workers,num_iterations,profile,tag\na,0,1,10,model,x\nb,5.5,4,20,even,y\n"
GAVEL = {
    "k80": {
        "('ResNet-18 (batch size 16)', 1)": {"null": 4.0, "('A3C (batch size 4)', 1)": [2.5, 3.0]},
        "('A3C (batch size 4)', 1)": {"null": 1.5},
    }
}
CONTEST = {
    "problem": {
        "name": "small",
        "nodes": {
            "intervals": [[0, 2], [1, 3], [0, 0]],
            "costs": [[1, 2], [0, 10**18, 3], [5]],
            "usages": [[4, 1], [3, 3, 2], [9]],
        },
        "edges": {"nodes": [[0, 1], [2, 1]], "costs": [[0, 1, 2, 3, 10**18, 5], [7, 8, 9]]},
        "usage_limit": 6,
    }
}
RULES = b"""name = "mine"
description = "a set"
source = "a paper"
replicated_batch = "data"
axes = ["model"]
[[rule]]
name = "dense"
kind = ["dense", "embedding"]
path = "**/kernel"
regex = "^params/[a-z]+"
shape = ["*", 4096, "..."]
min_size = 16
max_size = 100000
shard = [{out = "model"}, {"-1" = ["data", "model"]}, {}]
ties = "hard"
store = "storage"
[[rule]]
name = "rest"
shard = []
"""
TARGETS = (b"tpu:v5e:4x4", b"tpu:v5p:2*4x4x4", b"gpu:h200:2x8", b"cpu:8")
OPTIONS = b"""batch_size = 64
[data]
data = "cifar10"
[optimizer]
learning_rate = 0.1
[training]
epochs = 2
"""
METRICS = b"""{"step": 1, "loss": 2.5, "seconds": 0.1}
{"step": 2, "loss": 2.25, "seconds": 0.1}
{"step": 3, "loss": 2.0}
"""


def documents(*names: str) -> Callable[[], Sequence[bytes]]:
    """Returns what reads the JSON documents `names` of the tests."""
    return lambda: [(_DOCUMENTS / f"{name}.json").read_bytes() for name in names]


def locks() -> list[bytes]:
    """Returns locks of plans, those of the tests that are short enough to be changed as a whole."""
    return [file.read_bytes() for file in sorted((_ROOT / "tests" / "planning" / "locks").glob("mlp-*.lock"))]


def with_packed(*texts: bytes) -> list[bytes]:
    """Returns `texts`, and each packed by gzip."""
    return [*texts, *(gzip.compress(text, mtime=0) for text in texts)]


def rule_sets() -> list[bytes]:
    """Returns the shipped rule sets and one with every key in use."""
    return [RULES, *(file.read_bytes() for file in sorted((_ROOT / "sharding_rules").glob("*.toml")))]


def idx_files() -> list[bytes]:
    """Returns IDX files of images, labels and floats, plain and packed."""
    images = b"\0\0\x08\x03" + struct.pack(">3I", 2, 3, 4) + bytes(range(24))
    labels = b"\0\0\x08\x01" + struct.pack(">I", 5) + bytes(range(5))
    floats = b"\0\0\x0d\x02" + struct.pack(">2I", 2, 1) + struct.pack(">2f", 1.5, -2.0)
    return with_packed(images, labels, floats)


def cifar_records() -> list[bytes]:
    """Returns binary files of CIFAR-10 of one and of three images."""
    return [b"\x03" + bytes(3072), b"".join(bytes([label]) + bytes([label]) * 3072 for label in (0, 9, 4))]


def cifar_pickles() -> list[bytes]:
    """Returns files of CIFAR-10 for Python: by pickles of three protocols, and as Python 2 writes them."""
    value = {b"data": np.full((1, 3072), 7, np.uint8), b"labels": [3]}
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87R"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    pixels = b"T" + struct.pack("<i", 3072) + bytes(3072)
    state = b"(K\x01K\x01M\x00\x0c\x86" + dtype + b"\x89" + pixels + b"tb"
    python2 = b"\x80\x02}q\x00(U\x04data" + array + state + b"U\x06labels](K\x03eU\x0bbatch_labelU\x01xu."
    return [python2, *(pickle.dumps(value, protocol) for protocol in (2, 3, 4))]


def archives() -> list[bytes]:
    """Returns archives of CIFAR-10's files, plain and packed, in three formats of tar."""
    made = []
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=form, bufsize=512) as tar:
            for name in ("README" + ("x" * 110 if form != tarfile.USTAR_FORMAT else ""), "batches/test_batch.bin"):
                info = tarfile.TarInfo(name)
                info.size = 700
                tar.addfile(info, io.BytesIO(bytes(700)))
        made.append(out.getvalue())
    return with_packed(*made)


def cifar_archive() -> list[bytes]:
    """Returns a packed archive of the six binary files, of an image each."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = 3073
            tar.addfile(info, io.BytesIO(bytes(3073)))
    return [gzip.compress(out.getvalue(), mtime=0)]


def sums() -> list[bytes]:
    """Returns a file of checksums."""
    return [b"".join(hashlib.sha256(name).hexdigest().encode() + b"  " + name + b"\n" for name in (b"a.bin", b"b c"))]


def criteo_lines() -> list[bytes]:
    """Returns lines of Criteo's data, plain and packed."""
    line = "\t".join(
        ["1", *("5" if i % 3 else "" for i in range(13)), *("68fd1e64" if i % 4 else "" for i in range(26))]
    )
    return with_packed(f"{line}\n{line.replace('1', '0', 1)}\n{line}".encode())


def criteo_arrays() -> list[bytes]:
    """Returns arrays of Criteo's data, stored and packed."""
    made = []
    for save in (np.savez, np.savez_compressed):
        out = io.BytesIO()
        save(
            out,
            ids=np.ones((3, 26), np.int32),
            values=np.ones((3, 13), np.float32),
            clicked=np.array([0, 1, 0], np.int8),
        )
        made.append(out.getvalue())
    return made


def manifests() -> list[bytes]:
    """Returns a sealed manifest."""
    content = {"format": 1, "about": {"metrics": {"loss": 1.5}}, "files": {"input": {"bytes": 3, "sha256": "0" * 64}}}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return [(json.dumps({**content, "sha256": digest}, indent=1, sort_keys=True) + "\n").encode()]


def modules() -> list[bytes]:
    """Returns serialised HLO modules of a few instructions, with every field that is read in use."""
    shape = _message((2, 11), (3, b"\x04\x08"), (4, _message((2, 3))))
    groups = _message((1, b"\x00\x01"))
    plain = _message(
        (1, b"a.1"),
        (2, b"all-reduce"),
        (3, shape),
        (7, _message((2, b"jit(f)/dot"), (3, b"f.py"), (4, 3), (15, 1))),
        (35, 1),
        (36, 2),
        (38, b"\x01\x02"),
        (49, groups),
        (52, _message((1, 0), (2, 1))),
        (63, b"LT"),
    )
    loop = _message((1, b"w"), (2, b"while"), (3, shape), (35, 2), (43, b'{"known_trip_count": {"n": "12"}}'))
    config = _message((1, b"v"), (2, b"while"), (35, 5), (99, _message((2, 0))))
    constant = _message((1, b"c"), (2, b"constant"), (8, _message((5, 7))), (35, 3), (13, 1), (9, 2))
    iota = _message(
        (1, b"g"),
        (2, b"all-gather"),
        (35, 4),
        (92, _message((1, 2), (2, 4), (3, b"\x02\x04"), (4, b"\x01\x00"))),
        (68, _message((1, _message((1, b"chain_id"), (2, b"x"))))),
    )
    mesh = _message(
        (1, _message((1, _message((2, 2))), (2, b"\x00\x01"), (3, _message((1, 2), (2, 0))))),
        (2, _message((1, 0), (2, _message((1, 1), (2, 2))))),
    )
    by_mesh = _message((1, b"m"), (2, b"all-to-all"), (35, 6), (93, mesh))
    computation = _message(*((2, part) for part in (plain, loop, config, constant, iota, by_mesh)), (5, 1), (6, 1))
    index = _message((1, b"f.py"), (2, b"f"), (3, _message((1, 1), (2, 1), (3, 9))), (4, _message((1, 1), (2, 0))))
    order = _message((1, _message((1, 1), (2, _message((1, b"\x01\x02"))))))
    return [_message((3, computation), (6, 1), (7, order), (17, index), (22, b'{"known_trip_count": {"n": "3"}}'))]


def assignments() -> list[bytes]:
    """Returns a serialised buffer assignment with every field that is read in use."""
    place = _message((4, 1), (3, b"\x00\x01"))
    value = _message((1, 7), (2, 64), (3, place))
    allocation = _message((2, 128), (3, 0), (5, 1), (7, 1), (12, 1), (9, _message((1, 7), (2, 64), (3, 64))))
    return [_message((1, value), (2, _message((1, 7), (2, place))), (3, allocation))]


def _message(*fields: tuple[int, int | bytes]) -> bytes:
    made = b""
    for number, value in fields:
        if isinstance(value, int):
            made += _varint(number << 3) + _varint(value)
        else:
            made += _varint(number << 3 | 2) + _varint(len(value)) + value
    return made


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes((*made, value))
