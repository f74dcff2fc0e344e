"""The ids that the benchmark of sparse synchronisation looks up: real word counts, real categorical features, and
made-up regimes."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

WORDS_FILE, CRITEO_FILE, TEXT_FILE = "lm1b_word_counts.npy", "criteo_sample.npz", "wikitext2_valid.txt"
BPTT = 20  # tokens of a sequence
TOKENS, NEGATIVES = 1024 * BPTT, 8192  # of a worker and step
CRITEO_ROWS = 1024  # of a worker and step


@dataclasses.dataclass(frozen=True)
class Workload:
    """One table and what a step looks up in it. `ids`: (step, worker, workers) -> i32[m], the same in every process."""

    name: str
    what: str
    num_rows: int
    width: int
    ids: Callable[[int, int, int], np.ndarray]

    def sets(self, steps: range, num_workers: int) -> list[list[np.ndarray]]:
        """[step][worker] sorted unique ids."""
        return [[np.unique(self.ids(step, worker, num_workers)) for worker in range(num_workers)] for step in steps]


def gradient(ids: np.ndarray, worker: int, width: int) -> np.ndarray:
    """f32[k, width]: whole numbers of -8 to 8, so that sums of up to 32 workers are exact in any order, in bfloat16
    too."""
    mixed = ids.astype(np.int64)[:, None] * 31 + np.arange(width) * 7 + worker * 13
    return (mixed * mixed % 17 - 8).astype(np.float32)


def lm1b(data_dir: pathlib.Path, table: str) -> Workload:
    """One Billion Word: a worker's 1024 sequences of 20 tokens, drawn by the words' real counts. `table`: `input`,
    looked up at the tokens; `softmax`, at the tokens and at 8192 negatives, log-uniform over the words by falling
    count."""
    counts = np.load(_file(data_dir, WORDS_FILE))
    edges = np.cumsum(counts / counts.sum())
    order = np.argsort(-counts, kind="stable") if table == "softmax" else None

    def ids(step: int, worker: int, num_workers: int) -> np.ndarray:
        rng = np.random.default_rng([step, worker])
        found = np.searchsorted(edges, rng.random(TOKENS)).clip(0, counts.size - 1)
        if order is not None:
            ranks = np.exp(rng.random(NEGATIVES) * np.log(counts.size + 1)).astype(np.int64) - 1
            found = np.concatenate([found, order[ranks.clip(0, counts.size - 1)]])
        return found.astype(np.int32)

    more = "" if table == "input" else f" and {NEGATIVES} log-uniform negatives"
    return Workload(
        f"lm1b, {table} table",
        f"{TOKENS} tokens{more} of a worker, drawn by the words' real counts",
        counts.size,
        32,
        ids,
    )


def criteo(data_dir: pathlib.Path) -> Workload:
    """Display advertising: 1024 real examples of a worker, 26 ids each, the fields one after the other in one table. A
    step takes the examples in an order of its own."""
    with np.load(_file(data_dir, CRITEO_FILE)) as file:
        per_field = file["ids"].astype(np.int64)
    sizes = per_field.max(axis=0) + 1
    rows = (per_field + np.cumsum(sizes) - sizes).astype(np.int32)

    def ids(step: int, worker: int, num_workers: int) -> np.ndarray:
        order = np.random.default_rng([step]).permutation(len(rows))
        return rows[np.take(order, range(worker * CRITEO_ROWS, (worker + 1) * CRITEO_ROWS), mode="wrap")].reshape(-1)

    return Workload("Criteo", f"{CRITEO_ROWS} real examples of a worker, 26 ids each", int(sizes.sum()), 16, ids)


def wikitext(data_dir: pathlib.Path) -> Workload:
    """A language model of WikiText-2's validation split: a worker's 1024 sequences of 20 tokens, from places drawn at
    random."""
    words, tokens = np.unique(
        np.array(_file(data_dir, TEXT_FILE).read_text(encoding="utf-8").split()), return_inverse=True
    )

    def ids(step: int, worker: int, num_workers: int) -> np.ndarray:
        starts = np.random.default_rng([step, worker]).integers(0, tokens.size - BPTT, TOKENS // BPTT)
        return tokens[starts[:, None] + np.arange(BPTT)].reshape(-1).astype(np.int32)

    return Workload("WikiText-2", f"{TOKENS} tokens of a worker, real text", words.size, 32, ids)


def wikitext_in_order(data_dir: pathlib.Path) -> Workload:
    """The same text in its order: each step takes the next tokens, a worker after the other, and begins again at the
    text's end."""
    words, tokens = np.unique(
        np.array(_file(data_dir, TEXT_FILE).read_text(encoding="utf-8").split()), return_inverse=True
    )

    def ids(step: int, worker: int, num_workers: int) -> np.ndarray:
        first = (step * num_workers + worker) * TOKENS
        return np.take(tokens, range(first, first + TOKENS), mode="wrap").astype(np.int32)

    return Workload("WikiText-2, in its order", f"{TOKENS} tokens of a worker, the text's next", words.size, 32, ids)


def made_up(
    name: str, what: str, num_rows: int, width: int, draw: Callable[[np.random.Generator, int], np.ndarray]
) -> Workload:
    """A regime. `draw`: (generator of a step, worker) -> ids, of which those of all workers come from equal
    generators."""
    return Workload(
        name,
        what,
        num_rows,
        width,
        lambda step, worker, _: draw(np.random.default_rng([step]), worker).astype(np.int32),
    )


def _few(rng: np.random.Generator, worker: int) -> np.ndarray:
    return rng.integers(0, 200_000, (64, 48))[worker % 64]


def _all(rng: np.random.Generator, worker: int) -> np.ndarray:
    return np.arange(4096)


def _half(rng: np.random.Generator, worker: int) -> np.ndarray:
    return np.random.default_rng([int(rng.integers(1 << 30)), worker]).permutation(8192)[:4096]


def _same(rng: np.random.Generator, worker: int) -> np.ndarray:
    return np.sort(rng.choice(400_000, 4000, replace=False))


def _apart(rng: np.random.Generator, worker: int) -> np.ndarray:
    return worker + 64 * rng.choice(8000, 3000, replace=False)


def named(name: str, data_dir: pathlib.Path) -> Workload:
    """A workload by its key."""
    made: dict[str, Callable[[], Any]] = {
        "lm1b_input": lambda: lm1b(data_dir, "input"),
        "lm1b_softmax": lambda: lm1b(data_dir, "softmax"),
        "criteo": lambda: criteo(data_dir),
        "wikitext": lambda: wikitext(data_dir),
        "wikitext_in_order": lambda: wikitext_in_order(data_dir),
        "few": lambda: made_up("few rows", "48 of 200,000 rows", 200_000, 16, _few),
        "all": lambda: made_up("all rows", "every row of a table of 4096", 4096, 64, _all),
        "half": lambda: made_up("half of the rows", "4096 of 8192 rows, others on each worker", 8192, 64, _half),
        "same": lambda: made_up("the same rows", "4000 of 400,000 rows, alike on all workers", 400_000, 32, _same),
        "apart": lambda: made_up(
            "rows of nobody else", "3000 of 512,000 rows, none on two workers", 512_000, 32, _apart
        ),
    }
    return made[name]()


def _file(data_dir: pathlib.Path, name: str) -> pathlib.Path:
    path = data_dir / name
    if not path.is_file():
        raise FileNotFoundError(f"--data-dir has no {name}: {data_dir}")
    return path
