"""What partial backpropagation costs in quality: networks trained at equal device time, on real images, every variant
with its own learning rate.

Rivals at equal cost: full backpropagation with a smaller batch, which takes the share of the device time that partial
backpropagation takes. All take as many steps; the full batch is shown beside them and costs more. Pairs have the same
start and the same order of examples.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

NUM_WORKERS, BATCH = 4, 64
SEEDS, TUNING_SEEDS = (1, 2, 3, 4, 5), (101, 102)
RATES = {"sgd": (0.01, 0.03, 0.1, 0.3), "adam": (3e-4, 1e-3, 3e-3, 1e-2)}
CLOSE = {"sgd": 0.05, "adam": 0.02}  # train loss of `count` above the smaller batch's, at most
CURVE_STEPS = 20
SMALLER = "full, smaller batch"


@dataclasses.dataclass(frozen=True)
class Task:
    """A network and its images. `start`: makes parameters to begin with, by seed; None: at random."""

    name: str
    train: tuple[Any, Any]
    test: tuple[Any, Any]
    widths: tuple[int, ...]
    num_classes: int
    num_steps: int
    pretrained_steps: int = 0  # of full backpropagation on the same images with other labels, before

    @property
    def text(self) -> str:
        height, width, channels = self.train[0].shape[1:]
        begins = (
            f", begun with {self.pretrained_steps} steps on the same images with their classes permuted"
            if self.pretrained_steps
            else ""
        )
        return (
            f"{self.name}: {len(self.train[0])} images of {height} x {width} x {channels}, {len(self.widths)}"
            f" convolutions of {self.widths}, {self.num_steps} steps{begins}"
        )


@dataclasses.dataclass(frozen=True)
class Run:
    """One training: losses over the whole training set at the end and on the way (step, loss), test accuracy."""

    train_loss: float
    accuracy: float
    curve: tuple[tuple[int, float], ...]


def tasks(quick: bool, data_dir: pathlib.Path) -> list[Task]:
    import numpy as np

    from splitjax.data import load_cifar10, load_digits

    digits = load_digits(image_size=None, channels=1)
    small = lambda images: np.asarray(images, np.float32).reshape(-1, 16, 2, 16, 2, 3).mean((2, 4)) / 255 * 2 - 1
    eights = lambda images: np.asarray(images, np.float32).reshape(-1, 8, 8, 1)
    of = lambda data, images: tuple(
        (images(split["image"][:]), np.asarray(split["label"][:])) for split in (data.train, data.test)
    )
    scaled = lambda images: eights(images) / 255 * 2 - 1
    steps = 2 * CURVE_STEPS if quick else 400  # half of them have a point of a curve, too
    found = [
        Task("digits", *of(digits, scaled), (8, 8, 16, 16), 10, steps),
        Task("digits, fine-tuned", *of(digits, scaled), (8, 8, 16, 16), 10, steps // 2, steps),
    ]
    if not quick:
        found.append(
            Task("CIFAR-10 sample", *of(load_cifar10(data_dir), small), (12, 12, 16, 16, 24, 24, 32, 32), 10, 480)
        )
    return found


def section(quick: bool, data_dir: pathlib.Path) -> Any:
    """The section on quality."""
    found = {}
    for task in tasks(quick, data_dir):
        for optimizer in ("adam",) if quick else ("sgd", "adam"):
            found[task.name, optimizer] = (
                task,
                _compare(task, optimizer, (1, 2) if quick else SEEDS, TUNING_SEEDS[:1] if quick else TUNING_SEEDS),
            )
    return _report(found)


def variants() -> dict[str, Any]:
    """Name -> `backprop`; the smaller batch has None and is named `SMALLER`."""
    from splitjax import PartialBackprop

    return {
        "full": None,
        SMALLER: None,
        "spatial, count": PartialBackprop(),
        "spatial, mean": PartialBackprop(estimator="mean"),
        "temporal": PartialBackprop(assignment="temporal"),
        "spatial, count, balanced": PartialBackprop(rebalance=True),
        "spatial, count, warm-up": PartialBackprop(warmup_steps=40),
    }


class Trainer:
    """One variant of one task, compiled once for all learning rates and seeds."""

    def __init__(self, task: Task, optimizer: str, backprop: Any, batch: int) -> None:
        import jax
        import jax.numpy as jnp
        import optax

        import splitjax

        self.task, self.batch = task, batch
        make = {"sgd": lambda learning_rate: optax.sgd(learning_rate, momentum=0.9), "adam": optax.adam}[optimizer]
        self.tx = optax.inject_hyperparams(make)(learning_rate=0.1)
        logits = network(task)

        def train_step(state: Any, batch: Any) -> Any:
            def loss_fn(params: Any) -> Any:
                return optax.softmax_cross_entropy_with_integer_labels(
                    logits(params, batch["image"]), batch["label"]
                ).mean()

            loss, grads = splitjax.value_and_grad(loss_fn)(state["params"])
            updates, opt = self.tx.update(grads, state["opt"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

        def evaluate(params: Any, images: Any, labels: Any) -> Any:
            found = logits(params, images)
            return optax.softmax_cross_entropy_with_integer_labels(found, labels).mean(), jnp.mean(
                jnp.argmax(found, -1) == labels
            )

        self._decorate = lambda: splitjax.parallelize(
            train_step, mesh={"data": NUM_WORKERS}, rules="data_parallel", backprop=backprop
        )
        self.step = self._decorate()
        self.evaluate = jax.jit(evaluate)

    def state(self, params: Any, rate: float) -> Any:
        import jax.numpy as jnp

        opt = self.tx.init(params)
        opt.hyperparams["learning_rate"] = jnp.asarray(rate, jnp.float32)
        return {"params": params, "opt": opt}

    def cost(self, params: Any) -> float:
        """Device time over that of full backpropagation with the whole batch."""
        planned = self.step.plan(self.state(params, 0.1), next(self.batches(0))).partial
        return self.batch / BATCH * (1.0 if planned is None else planned.device_time)

    def batches(self, seed: int, labels: Any = None) -> Iterator[dict[str, Any]]:
        """Batches of the training images, in an order drawn by the seed, without end; of an epoch's last images those
        that are no whole batch are left out. The first `batch` examples of a step are the same for every variant.
        `labels`: others than the task's."""
        import numpy as np

        images, own = self.task.train
        labels = own if labels is None else labels
        order, random = [], np.random.RandomState(seed)
        while True:
            if len(order) < BATCH:
                order = list(random.permutation(len(labels)))
            rows, order = order[:BATCH][: self.batch], order[BATCH:]
            yield {"image": images[rows], "label": labels[rows]}

    def run(self, params: Any, rate: float, seed: int, num_steps: int, labels: Any = None) -> tuple[Run, Any]:
        """Trains from `params`."""
        step, state, curve = self.step, self.state(params, rate), []
        labels = self.task.train[1] if labels is None else labels
        for number, batch in zip(range(num_steps), self.batches(seed, labels)):
            state, _ = step(state, batch)
            if number % CURVE_STEPS == CURVE_STEPS - 1:
                curve.append(
                    (number + 1, float(self.evaluate(state["params"], self.task.train[0][:1024], labels[:1024])[0]))
                )
        loss, _ = self.evaluate(state["params"], self.task.train[0], labels)
        accuracy = self.evaluate(state["params"], *self.task.test)[1]
        return Run(float(loss), float(accuracy), tuple(curve)), state["params"]


def network(task: Task) -> Callable[[Any, Any], Any]:
    """Convolutions of 3 x 3 with a ReLU, every second of stride 2, the mean over positions, a dense layer."""
    import jax
    import jax.numpy as jnp

    def logits(params: Any, images: Any) -> Any:
        x = images
        for k in range(len(task.widths)):
            stride = 1 + k % 2
            x = jax.lax.conv_general_dilated(
                x, params[f"conv{k}"]["w"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x + params[f"conv{k}"]["b"])
        return jnp.mean(x, (1, 2)) @ params["dense"]["w"] + params["dense"]["b"]

    return logits


def start(task: Task, seed: int) -> Any:
    """Parameters at random, by He's rule."""
    import numpy as np

    random, params, channels = np.random.RandomState(1000 + seed), {}, task.train[0].shape[-1]
    for k, width in enumerate(task.widths):
        params[f"conv{k}"] = {
            "w": (random.randn(3, 3, channels, width) * math.sqrt(2 / (9 * channels))).astype(np.float32),
            "b": np.zeros(width, np.float32),
        }
        channels = width
    params["dense"] = {
        "w": (random.randn(channels, task.num_classes) / math.sqrt(channels)).astype(np.float32),
        "b": np.zeros(task.num_classes, np.float32),
    }
    return params


def _compare(task: Task, optimizer: str, seeds: Sequence[int], tuning: Sequence[int]) -> dict[str, Any]:
    """Every variant: its cost, its learning rate, its runs."""
    import numpy as np

    found: dict[str, Any] = {}
    starts: dict[int, Any] = {}
    if task.pretrained_steps:
        before = Trainer(task, "adam", None, BATCH)
        permuted = np.random.RandomState(0).permutation(task.num_classes)[task.train[1]]
        for seed in (*seeds, *tuning):
            starts[seed] = _on_host(before.run(start(task, seed), 1e-3, seed, task.pretrained_steps, permuted)[1])
    else:
        starts = {seed: start(task, seed) for seed in (*seeds, *tuning)}
    spatial = Trainer(task, optimizer, variants()["spatial, count"], BATCH).cost(starts[seeds[0]])
    smaller = round(BATCH * spatial / NUM_WORKERS) * NUM_WORKERS
    for name, backprop in variants().items():
        began = time.perf_counter()
        trainer = Trainer(task, optimizer, backprop, smaller if name == SMALLER else BATCH)
        tuned = {
            rate: statistics.fmean(
                _fresh(trainer).run(starts[seed], rate, seed, task.num_steps)[0].train_loss for seed in tuning
            )
            for rate in RATES[optimizer]
        }
        rate = min(tuned, key=lambda one: tuned[one] if math.isfinite(tuned[one]) else math.inf)
        runs = [_fresh(trainer).run(starts[seed], rate, seed, task.num_steps)[0] for seed in seeds]
        found[name] = {"cost": trainer.cost(starts[seeds[0]]), "rate": rate, "tuned": tuned, "runs": runs}
        losses = statistics.fmean(run.train_loss for run in runs)
        print(
            f"{task.name}, {optimizer}, {name}: loss {losses:.4f}, rate {rate:g}, {time.perf_counter() - began:.0f} s",
            flush=True,
        )
    return found


def _fresh(trainer: Trainer) -> Trainer:
    """The same programs, with the assignment of depths from its beginning."""
    trainer.step.resume(None)
    return trainer


def _on_host(params: Any) -> Any:
    import jax
    import numpy as np

    return jax.tree.map(np.asarray, params)


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Mean of paired differences, and half the width of its 95 % confidence interval (Student's t)."""
    from scipy import stats

    half = stats.t.ppf(0.975, len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences), float(half)


def _report(found: dict[tuple[str, str], tuple[Task, dict[str, Any]]]) -> Any:
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Goal, Section

    lines = [
        (
            f"{NUM_WORKERS} workers, batches of {BATCH} examples; every variant takes as many steps."
            " The cost is the predicted device time over that of full backpropagation with the whole batch."
            f" The learning rate is the best of"
            f" {len(RATES['sgd'])} by the training loss on {len(TUNING_SEEDS)} other seeds."
            " The training loss is over all training images at the end; differences to the smaller batch are"
            " paired by seed,"
            f" with 95 % intervals."
            " Images of CIFAR-10 are averaged over 2 x 2 pixels."
        ),
        "",
    ]
    goals = []
    for (name, optimizer), (task, results) in found.items():
        lines += [f"### {name}, {optimizer}", "", f"{task.text}.", ""]
        base, rows = results[SMALLER]["runs"], []
        for variant, one in results.items():
            runs = one["runs"]
            loss, loss_half = interval(
                [run.train_loss - other.train_loss for run, other in zip(runs, base, strict=True)]
            )
            better, better_half = interval(
                [100 * (run.accuracy - other.accuracy) for run, other in zip(runs, base, strict=True)]
            )
            same = variant == SMALLER
            rows.append(
                [
                    variant,
                    f"{one['cost']:.3f}",
                    f"{one['rate']:g}",
                    f"{statistics.fmean(run.train_loss for run in runs):.4f}",
                    "" if same else f"{loss:+.4f} ± {loss_half:.4f}",
                    f"{100 * statistics.fmean(run.accuracy for run in runs):.2f} %",
                    "" if same else f"{better:+.2f} ± {better_half:.2f}",
                ]
            )
            if variant == "spatial, count":
                goals.append(
                    Goal(
                        f"{name}, {optimizer}: training loss of count above the smaller batch's",
                        loss,
                        CLOSE[optimizer],
                        True,
                        ".4f",
                    )
                )
        lines += [
            *table(
                [
                    "variant",
                    "cost",
                    "rate",
                    "training loss",
                    "against the smaller batch",
                    "test accuracy",
                    "against, points",
                ],
                rows,
            ),
            "",
        ]
    curves = {
        f"{name}, {optimizer}": {
            variant: [list(map(list, run.curve)) for run in one["runs"]] for variant, one in results.items()
        }
        for (name, optimizer), (_, results) in found.items()
    }
    return Section("Quality at equal cost", lines, goals), curves
