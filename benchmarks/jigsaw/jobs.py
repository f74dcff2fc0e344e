"""The training jobs of real execution (`jigsaw.real`, `jigsaw.real_accuracy`): what they train, and how they are
judged."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from splitjax.schedule import Place


@dataclasses.dataclass(frozen=True)
class Model:
    """What a job trains, and for how long: of digits or, by characters, of this project's documentation.
    `num_iterations`: no job shall be much longer than another."""

    family: str
    options: Mapping[str, Any]
    batch_size: int
    num_iterations: int

    @property
    def reads_text(self) -> bool:
        return self.family in ("transformer", "lstm")


LEARNING_RATE = 1e-3  # of Adam, in all jobs
MOST_HELD_OUT = 256  # examples that a job is judged by
_SEQ_LEN, _VOCABULARY = 63, 96
MODELS = {
    "vgg": Model("vgg11", {"width": 0.25, "head_features": (256, 256), "image_size": 32, "channels": 1}, 256, 28),
    "transformer": Model(
        "transformer",
        {"num_layers": 4, "d_model": 192, "num_heads": 4, "max_len": _SEQ_LEN + 1, "vocab_size": _VOCABULARY},
        64,
        16,
    ),
    "mlp": Model("mlp", {"features": (1024,) * 4, "input_shape": (32, 32, 1)}, 1024, 44),
    "lstm": Model(
        "lstm",
        {"num_layers": 2, "hidden_width": 384, "embedding_width": 192, "max_len": _SEQ_LEN, "vocab_size": _VOCABULARY},
        64,
        16,
    ),
}

# One job of images and one of text, at sizes that say nothing: for a walk through the code.
SMALL_MODELS = {
    "mlp": Model("mlp", {"features": (32,), "input_shape": (32, 32, 1)}, 16, 6),
    "lstm": Model(
        "lstm",
        {"num_layers": 1, "hidden_width": 16, "embedding_width": 16, "max_len": _SEQ_LEN, "vocab_size": _VOCABULARY},
        16,
        6,
    ),
}


@dataclasses.dataclass
class Batches:
    """`Training.batch`: examples drawn by `seed` and the number of the iteration."""

    data: Any
    batch_size: int
    seed: int = 0

    def __call__(self, number: int) -> Any:
        import numpy as np

        rows = np.random.default_rng((self.seed, number)).integers(0, self.data.num_train, self.batch_size)
        batch = {key: values[rows] for key, values in self.data.train.items()}
        return self.data.transform(batch) if self.data.transform else batch


@dataclasses.dataclass
class ByAssignment:
    """`Training.at_depths` of a job that can be trained by either assignment of depths; `is_temporal` says by which.
    Full depth on all workers is full backpropagation in the one, and a turn among others in the other."""

    spatial: Callable[[tuple[float, ...]], Any]
    temporal: Callable[[tuple[float, ...]], Any]
    is_temporal: bool = False

    def __call__(self, depths: tuple[float, ...]) -> Any:
        return (self.temporal if self.is_temporal else self.spatial)(depths)


class BegunOnce:
    """A decorated step that makes the state to begin with once, and gives copies of it: making it compiles a program
    each time, and every run begins anew. For one `init_fn` and key."""

    def __init__(self, step: Any):
        self._step, self._first = step, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def __call__(self, *arguments: Any) -> Any:
        return self._step(*arguments)

    def init(self, *arguments: Any, example: Any) -> Any:
        import jax

        if self._first is None:
            self._first = self._step.init(*arguments, example=example)
        return jax.tree.map(lambda array: array.copy(), self._first)  # a step may overwrite what it is given


def build(model: Model, place: Place) -> Any:
    """A `Training`."""
    import jax

    import splitjax
    from splitjax.runtime.scheduled import Training, partial_steps

    init_fn, train_step, _ = _steps(model)
    decorate = lambda backprop: splitjax.parallelize(
        train_step, mesh={"data": place.num_workers}, rules="data_parallel", backprop=backprop
    )
    step, spatial, warm_up = partial_steps(decorate, place.num_workers)
    _, temporal, in_turn = partial_steps(decorate, place.num_workers, assignment="temporal")
    return Training(
        BegunOnce(step),
        init_fn,
        jax.random.key(0),
        Batches(_data(model), model.batch_size),
        at_depths=ByAssignment(spatial, temporal),
        warm_up=tuple(dict.fromkeys((*warm_up, *in_turn))),
    )


Judge = Callable[[Any], Mapping[str, float]]


def judge(model: Model) -> Judge:
    """Makes what gives the loss and the accuracy of a state on examples that are held out: at most `MOST_HELD_OUT` of
    them, evenly spaced. For one process of a job, which needs nothing of the others: each has all parameters."""
    import jax
    import numpy as np

    data, evaluate = _data(model), jax.jit(_steps(model)[2])
    rows = np.unique(np.linspace(0, data.num_test - 1, MOST_HELD_OUT).astype(int))
    batch = {key: values[rows] for key, values in data.test.items()}
    batch = data.transform(batch) if data.transform else batch

    def judged(state: Any) -> Mapping[str, float]:
        own = {key: value for key, value in state.items() if key != "opt"}
        metrics = evaluate(jax.tree.map(lambda array: array.addressable_data(0), own), batch)
        return {metric: float(value) for metric, value in metrics.items()}

    return judged


def _steps(model: Model) -> Any:
    """What makes a state, trains it and evaluates it."""
    import optax

    import splitjax

    loss = "cross_entropy" if model.family == "lstm" else None
    return splitjax.models.make_step(
        splitjax.models.build(model.family, **model.options),
        optax.adam(LEARNING_RATE),
        loss=loss,
        value_and_grad=splitjax.value_and_grad,
    )


def _data(model: Model) -> Any:
    import splitjax

    return _text() if model.reads_text else splitjax.data.load_digits(image_size=32, channels=1)


def _text() -> Any:
    import splitjax

    root = pathlib.Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "docs.txt"
        file.write_text(
            "\n".join(one.read_text(encoding="utf-8") for one in sorted(root.glob("docs/*.md"))), encoding="utf-8"
        )
        return splitjax.data.load_text(file, seq_len=_SEQ_LEN, vocab_size=_VOCABULARY, level="char")
