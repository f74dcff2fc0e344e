"""A training script of one's own under the launcher, with what can go wrong in it: `python -m benchmarks.faults.worker
FOLDER [options]`.

Two processes share every batch of digits, so that each step waits for both. A fault strikes one rank, once, in the
first attempt: the functions called `stuck_...` are what the launcher's stacks have to show.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

FAULTS = ("python", "loader", "collective", "trace", "compile", "save", "slow", "memory", "gone")
SLOW_SECONDS = 0.2
BACK = "back"  # a file that says that a worker which was gone is there again


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("worker", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint-every", type=int, default=20)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that reading a batch takes")
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument("--rank", type=int, default=0, help="whom the fault strikes")
    parser.add_argument("--at", type=int, default=60, help="the step in which it does")
    parser.add_argument("--bad-step", type=int, help="the step whose batch is not finite")
    parser.add_argument("--bad-numbers", choices=("stop", "skip", "rollback"), default="stop")
    parser.add_argument("--by-hand", action="store_true", help="the same without splitjax's loop, to compare with")
    options = parser.parse_args(argv)

    import jax
    import jax.numpy as jnp
    import optax
    from flax import linen as nn

    import splitjax
    from splitjax import data, runtime
    from splitjax.errors import SplitjaxError

    splitjax.initialize()  # on a cluster; under the launcher importing has done it
    is_struck = jax.process_index() == options.rank and os.environ.get("SPLITJAX_ATTEMPT", "0") == "0"
    fault = options.fault if is_struck else None
    if options.fault == "gone" and jax.process_index() == options.rank and not is_struck:
        if not (options.folder / BACK).exists():
            os._exit(3)  # its machine is not there any more
    if fault == "compile":
        jax.monitoring.register_event_duration_secs_listener(stuck_in_compile)
    model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(10)])
    tx = optax.adam(1e-3)

    def init_fn(key: jax.Array) -> dict[str, Any]:
        params = model.init(key, jnp.zeros((1, 64)))
        return {"params": params, "opt": tx.init(params), "key": key}

    @splitjax.parallelize(rules="data_parallel")
    def train_step(state: dict[str, Any], batch: dict[str, jax.Array]) -> Any:
        if fault == "trace":
            stuck_in_trace()
        key, noise = jax.random.split(state["key"])

        def loss_fn(params: Any) -> jax.Array:
            images = batch["image"].reshape(-1, 64)
            images += 0.1 * jax.random.normal(noise, images.shape)
            return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, images), batch["label"]).mean()

        loss, gradients = splitjax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "key": key}, {"loss": loss}

    digits = data.load_digits(image_size=None, channels=1)
    example = {
        "image": jax.ShapeDtypeStruct((32, 8, 8, 1), jnp.float32),
        "label": jax.ShapeDtypeStruct((32,), jnp.int32),
    }
    key, folder = jax.random.key(0), options.folder
    try:
        with (
            runtime.Checkpoints(runtime.CheckpointOptions(folder / "ck", keep_last=1000)) as checkpoints,
            runtime.StopRequest() as stop,
        ):
            seen = None
            if checkpoints.newest_good() is None:
                state, position, done = train_step.init(init_fn, key, example=(example,)), data.Position(), 0
            else:
                restored = runtime.restore(checkpoints, train_step, init_fn, key, example=(example,))
                state, position, done = (
                    restored.state,
                    data.Position.from_json(restored.extra["position"]),
                    restored.step,
                )
                seen = restored.extra.get("numbers")
                if jax.process_index() == 0:
                    print(f"resumed from the checkpoint of step {done}", flush=True)
            place = runtime.batch_layout(train_step, state, example)
            rows = digits.train_stream(32, seed=0, start=position, rows=place.rows)
            if options.by_hand:
                with data.prefetch(_read(rows, 0, options, None), place) as batches:
                    state, position = _by_hand(train_step, state, batches, options)
                extra = {"position": position.to_json()}
                checkpoints.save(options.steps, state, extra, {}, wait=True)
                return 0
            observers: list[Any] = [_HostCode(fault, options.at)]
            if jax.process_index() == 0:
                observers.append(runtime.JsonLines(folder / "m.jsonl", done))
            with data.prefetch(_read(rows, done, options, fault), place) as batches:
                outcome = runtime.train(
                    train_step,
                    state,
                    batches,
                    runtime.LoopOptions(options.steps, 32, checkpoint_every=options.checkpoint_every),
                    first_step=done + 1,
                    checkpoints=_Saves(checkpoints, options.at if fault == "save" else None),
                    stop=stop,
                    observers=observers,
                    guard=runtime.NumberGuard(runtime.NumberOptions(options.bad_numbers), seen),
                )
            for observer in observers:
                observer.close()
    except SplitjaxError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    print(f"the clock shows {time.time():.0f}", flush=True)
    return stop.exit_status if outcome.stopped else 0


def _read(rows: Iterator[Any], done: int, options: argparse.Namespace, fault: str | None) -> Iterator[Any]:
    """The batches of `rows`, at their pace; in the thread that reads ahead."""
    for number, (position, batch) in enumerate(rows, done + 1):
        if fault == "loader" and number == options.at:
            stuck_in_loader()
        if number == options.bad_step:
            batch = {**batch, "image": batch["image"] * float("nan")}
        time.sleep(options.pace)
        yield position, batch


def _by_hand(step: Any, state: Any, batches: Iterator[Any], options: argparse.Namespace) -> tuple[Any, Any]:
    """A loop as one would write it: it knows which batch is bad, and leaves it out, or goes back to what would have
    been saved. Returns the last state, and where its data go on."""
    import jax

    copy = lambda tree: jax.tree.map(lambda leaf: leaf.copy(), tree)
    saved = copy(state)
    for number, (position, batch) in enumerate(batches, 1):
        if number != options.bad_step:
            state, _ = step(state, batch)
        elif options.bad_numbers == "rollback":
            state = copy(saved)
        if number % options.checkpoint_every == 0:
            saved = copy(state)
        if number == options.steps:
            return state, position
    raise AssertionError("batches of a stream do not end")


class _HostCode:
    """What a script does between steps: here is where its Python gets stuck, or is slow."""

    def __init__(self, fault: str | None, at: int):
        self._fault, self._at = fault, at

    def step(self, row: Mapping[str, Any]) -> None:
        if self._fault == "slow":
            time.sleep(SLOW_SECONDS)
        elif self._fault == "python" and row["step"] == self._at:
            stuck_in_python()
        elif self._fault == "collective" and row["step"] == self._at:
            stuck_in_a_collective()
        elif self._fault == "memory" and row["step"] == self._at:
            take_memory()
        elif self._fault == "gone" and row["step"] == self._at:
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        pass


class _Saves:
    """Checkpoints on a disk that does not answer one rank from step `at` on; None: that does."""

    def __init__(self, checkpoints: Any, at: int | None):
        self._checkpoints, self._at = checkpoints, at

    def save(self, step: int, *arguments: Any, **options: Any) -> bool:
        if self._at is not None and step >= self._at:
            stuck_in_save()
        return self._checkpoints.save(step, *arguments, **options)

    def restore(self, like: Any) -> Any:
        return self._checkpoints.restore(like)


def stuck_in_python() -> None:
    while True:
        time.sleep(60)


def stuck_in_loader() -> None:
    while True:
        time.sleep(60)


def stuck_in_trace() -> None:
    while True:
        time.sleep(60)


def stuck_in_compile(event: str, _: float, fun_name: str = "", **__: Any) -> None:
    """Hears of the step's program being lowered, which is where XLA begins to compile it."""
    if "jaxpr_to_mlir_module" not in event or "train_step" not in fun_name:
        return
    while True:
        time.sleep(60)


def stuck_in_save() -> None:
    while True:
        time.sleep(60)


def stuck_in_a_collective() -> None:
    """Joins a barrier that no other process joins, as a collective under `if jax.process_index() == 0` does."""
    from splitjax import _compat

    client = _compat.coordination_client()
    assert client is not None
    client.wait_at_barrier("one-process-alone", timeout_in_ms=10**9)


def take_memory() -> None:
    """Takes more memory than this process may have."""
    now = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 2**27, now + 2**27))
    taken = []
    while True:
        taken.append(bytearray(2**24))


if __name__ == "__main__":
    sys.exit(main())
