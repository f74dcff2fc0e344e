"""A training script that loses workers for good: `elastic_worker.py FOLDER DEVICES LAST GONE AT`.

Trains in float64 on DEVICES devices of the axis `data` to step LAST, and saves every 5 steps. Each process reads its
own rows of the global batch. GONE (workers, as `1,3`, or `-`) kill themselves after step AT, and again whenever they
are started; a `+` behind them lets them come back, and makes steps slow.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time

import jax
import numpy as np
import optax

import splitjax
from splitjax import runtime

BATCH_SIZE = 24
jax.config.update("jax_enable_x64", True)


class Told:
    """Prints every loss, also of steps that are done again."""

    def step(self, row) -> None:
        print(f"step {row['step']} has loss {row['loss'].hex()}", flush=True)

    def close(self) -> None:
        pass


def batch_at(number: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    return {"x": rng.normal(size=(BATCH_SIZE, 12)), "y": rng.normal(size=(BATCH_SIZE, 3))}


def main() -> None:
    folder, devices, last, gone, at = (
        pathlib.Path(sys.argv[1]),
        int(sys.argv[2]),
        int(sys.argv[3]),
        sys.argv[4],
        int(sys.argv[5]),
    )
    is_first, comes_back = os.environ["SPLITJAX_ATTEMPT"] == "0", gone.endswith("+")
    is_gone = os.environ["SPLITJAX_WORKER"] in gone.rstrip("+").split(",") and (is_first or not comes_back)
    if is_gone and not is_first:
        os.kill(os.getpid(), signal.SIGKILL)
    tx = optax.adam(1e-2)

    def init_fn(key):
        keys = jax.random.split(key, 2)
        params = {"in": jax.random.normal(keys[0], (12, 16)) / 4, "out": jax.random.normal(keys[1], (16, 3)) / 4}
        return {"params": params, "opt": tx.init(params), "key": jax.random.key(1)}

    def step_fn(state, batch):
        key, drop = jax.random.split(state["key"])

        def loss_fn(params):
            hidden = jax.numpy.tanh(batch["x"] @ params["in"])
            kept = jax.random.bernoulli(drop, 0.9, hidden.shape)
            return ((hidden * kept @ params["out"] - batch["y"]) ** 2).mean()

        loss, grads = splitjax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "key": key}, {"loss": loss}

    mesh = runtime.run_mesh({"data": devices})
    step = splitjax.parallelize(step_fn, mesh=mesh, rules="data_parallel")
    example = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in batch_at(0).items()}
    with runtime.Checkpoints(runtime.CheckpointOptions(folder / "ck", keep_last=100)) as checkpoints:
        done, key = 0, jax.random.key(0)
        if checkpoints.newest_good() is None:
            state = step.init(init_fn, key, example=(example,))
        else:
            restored = checkpoints.restore(step.abstract_state(init_fn, key, example=(example,)))
            state, done = restored.state, restored.step
        placement = runtime.batch_layout(step, state, example)
        rows = placement.rows["x"]

        def batches():
            for number in range(done, last):
                time.sleep(0.1 if comes_back else 0.0)
                if number >= at and is_gone:
                    checkpoints.wait()
                    os.kill(os.getpid(), signal.SIGKILL)
                whole = batch_at(number)
                yield number + 1, placement({name: array[rows] for name, array in whole.items()})

        first = jax.process_index() == 0
        rows_read = f"rows {rows[0]} to {rows[-1]} of process {jax.process_index()} from step {done + 1}"
        print(f"on {dict(step.mesh.shape)}: {rows_read}", flush=True)
        observers = [Told()] if first else []
        observers += [runtime.JsonLines(folder / "m.jsonl", done)] if first else []
        outcome = runtime.train(
            step,
            state,
            batches(),
            runtime.LoopOptions(last, BATCH_SIZE, checkpoint_every=5),
            first_step=done + 1,
            checkpoints=checkpoints,
            observers=observers,
        )
        if first:
            leaves = {f"p{name}": np.asarray(leaf) for name, leaf in outcome.state["params"].items()}
            np.savez(folder / "end.npz", **leaves)
        for observer in observers:
            observer.close()


main()
