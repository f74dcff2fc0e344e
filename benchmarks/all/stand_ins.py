"""Drawn data in the formats that the benchmarks read, for a walk without the real files: right in shape and in kind, so
that all code meets what it expects; no figure that comes of them means anything."""

from __future__ import annotations

import csv
import datetime
import gzip
import json
import pathlib
from collections.abc import Sequence

import numpy as np

from benchmarks.sparse.data import CRITEO_FILE, TEXT_FILE, WORDS_FILE

_SCRIPT = '''"""A perceptron in plain JAX, in the form of an example that is not this project's own."""

import time

import jax.numpy as jnp
from jax import grad, jit
from jax.scipy.special import logsumexp


def init_random_params(scale, layer_sizes, rng):
    return [(scale * rng.randn(m, n), scale * rng.randn(n)) for m, n in zip(layer_sizes[:-1], layer_sizes[1:])]


def predict(params, inputs):
    activations = inputs
    for weights, bias in params[:-1]:
        activations = jnp.tanh(jnp.dot(activations, weights) + bias)
    weights, bias = params[-1]
    logits = jnp.dot(activations, weights) + bias
    return logits - logsumexp(logits, axis=1, keepdims=True)


def loss(params, batch):
    inputs, targets = batch
    return -jnp.mean(jnp.sum(predict(params, inputs) * targets, axis=1))


if __name__ == "__main__":
    step_size = 0.001

    @jit
    def update(params, batch):
        grads = grad(loss)(params, batch)
        return [(w - step_size * dw, b - step_size * db) for (w, b), (dw, db) in zip(params, grads)]
'''


def write_stand_ins(folder: pathlib.Path) -> None:
    """Writes all files that the benchmarks read into `folder`, images and other people's examples included."""
    draws = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    _write_sparse(folder, draws)
    _write_images(folder / "cifar-10-batches-bin", draws)
    _write_philly(folder / "philly_jobs.csv.gz", draws)
    _write_muri(folder / "muri", draws)
    _write_iopddl(folder / "iopddl")
    script = folder / "sources" / "jax" / "examples" / "mnist_classifier_fromscratch.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(_SCRIPT, encoding="utf-8")


def _write_sparse(folder: pathlib.Path, draws: np.random.Generator) -> None:
    counts = 1 + (1e7 / np.arange(1, 793_472)).astype(np.int32)  # as many words, as often, as Zipf's law says
    np.save(folder / WORDS_FILE, draws.permutation(counts))
    ids = np.minimum(draws.zipf(1.3, (16_384, 26)), 20_000) + 20_000 * np.arange(26)
    np.savez_compressed(
        folder / CRITEO_FILE,
        ids=ids.astype(np.int32),
        values=draws.normal(size=(16_384, 13)).astype(np.float32),
        clicked=(draws.random(16_384) < 0.25).astype(np.int8),
    )
    words = np.minimum(draws.zipf(1.2, 200_000), 13_000)
    lines = (" ".join(f"w{word}" for word in part) for part in np.array_split(words, 2_000))
    (folder / TEXT_FILE).write_text("\n".join(f" {line} " for line in lines) + "\n", encoding="utf-8")


def _write_images(folder: pathlib.Path, draws: np.random.Generator) -> None:
    """Writes CIFAR-10's binary records: a label's images are noise around a colour of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        labels = draws.integers(0, 10, 761)
        pixels = np.clip(draws.normal(40 + 18 * labels[:, None], 30, (761, 3072)), 0, 255)
        np.concatenate([labels[:, None], pixels], axis=1).astype(np.uint8).tofile(folder / name)


def _write_philly(path: pathlib.Path, draws: np.random.Generator) -> None:
    start = datetime.datetime(2017, 10, 1)
    rows: list[Sequence[object]] = [("timestamp", "duration", "num_gpus", "gpu_time", "cluster")]
    for number in range(4_000):
        seconds, width = round(60 + draws.lognormal(7, 1.5)), int(draws.choice([1, 2, 4, 8], p=[0.6, 0.1, 0.15, 0.15]))
        at = start + datetime.timedelta(seconds=int(60 * number))
        cluster = str(draws.choice(["ee9e8c", "7f04ca", "103959", "6c71a0", "6214e9"]))
        rows.append((at.isoformat(sep=" "), float(seconds), width, float(seconds * width), cluster))
    with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)


def _write_muri(folder: pathlib.Path, draws: np.random.Generator) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("trace1", 200), ("trace2", 200), ("trace3", 200), ("testbed_trace", 60)):
        jobs = _muri_jobs(count, draws)
        _write_csv(folder / f"{name}.csv", jobs)
    for policy in ("Muri-L", "Muri-S", "SRSF", "SRTF", "themis", "tiresias"):
        _write_csv(folder / f"testbed_{policy}.csv", _muri_outcomes(jobs, draws))


def _muri_jobs(count: int, draws: np.random.Generator) -> list[dict[str, object]]:
    models = {
        "vgg16": 214,
        "gpt2": 437,
        "bert": 300,
        "resnet18": 150,
        "a2c": 517,
        "dqn": 490,
        "shufflenet_v2_x1_0": 120,
    }
    found, at = [], 0
    for number in range(count):
        model = str(draws.choice(list(models)))
        iterations = int(draws.integers(500, 5_000))
        interval = int(draws.integers(1_000, 90_000))
        parts = draws.dirichlet((1.0, 2.0, 1.0)) * models[model]
        found.append(
            {
                "job_id": number, "num_gpu": int(draws.choice([1, 2, 4, 8])), "submit_time": at,
                "iterations": iterations, "model_name": model, "batch_size": 16,
                "duration": iterations * models[model], "interval": interval, "iteration_time": models[model],
                **{f"resource_time_{place}": round(float(part), 1) for place, part in enumerate(parts)}, "priority": 0,
            }
        )  # fmt: skip
        at += interval
    return found


def _muri_outcomes(jobs: Sequence[dict[str, object]], draws: np.random.Generator) -> list[dict[str, object]]:
    """Draws what a testbed might have measured: each job waited, and ran somewhat longer than alone."""
    found = []
    for job in jobs:
        submitted, alone = float(str(job["submit_time"])) / 1000, float(str(job["duration"])) / 1000
        start = submitted + draws.exponential(300.0)
        end = start + alone * draws.uniform(1.0, 1.2)
        found.append(
            {
                "time": end, "job_id": job["job_id"], "num_gpu": job["num_gpu"], "submit_time": submitted,
                "start_time": start, "end_time": end, "executed_time": end - start, "real_executed_time": end - start,
                "JCT": end - submitted, "duration": alone, "pending_time": start - submitted, "job_counter": 1,
                "promote": 0,
            }
        )  # fmt: skip
    return found


def _write_csv(path: pathlib.Path, rows: Sequence[dict[str, object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def _write_iopddl(folder: pathlib.Path) -> None:
    """Writes a problem of two nodes, and standings of two teams."""
    folder.mkdir()
    problem = {
        "nodes": {"intervals": [[0, 2], [1, 3]], "costs": [[1, 2], [0, 1]], "usages": [[5, 3], [4, 3]]},
        "edges": {"nodes": [[0, 1]], "costs": [[0, 10**18, 9, 0]]},
        "usage_limit": 6,
    }
    (folder / "asplos-2025-iopddl-B.json").write_text(json.dumps({"problem": problem}))
    (folder / "final_results.csv").write_text("TEAM #,B\nteam01,6\nteam02,3\nXLA,12\n")
