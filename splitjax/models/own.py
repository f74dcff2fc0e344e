"""Training steps from other packages, and the functions that make them: what `--model package.module:factory` names.

A factory is any function of its own options. It returns a `ModelSpec`, whose step `make_step` makes with the optimizer
that the command line chooses, or an `OwnStep`, which is complete: splitjax decorates it and adds nothing.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np

from splitjax._registry import near
from splitjax.errors import SplitjaxError
from splitjax.models._common import ModelError
from splitjax.models.spec import ModelSpec

if TYPE_CHECKING:
    from splitjax.data.dataset import Dataset


@dataclasses.dataclass(frozen=True)
class OwnStep:
    """Holds a whole training step of your own, written for one device: states, updates, and what it reads.

    **Attributes:**

    - `init_fn`: `init_fn(key) -> state`, any pytree of arrays; `key` is a typed PRNG key.
    - `train_step`: `train_step(state, batch) -> (state, metrics)`, not decorated, with `splitjax.value_and_grad` (or
      `splitjax.grad`) as its gradient boundary. The metrics are scalars by name, with `"loss"` for `splitjax train`.
    - `example`: `example(batch_size) -> batch`, a pytree of `jax.ShapeDtypeStruct` (or arrays) whose first dim is the
      examples; for `splitjax train`, of the names and shapes of `dataset`'s batches.
    - `eval_step`: `eval_step(state, batch) -> {"loss": f32[], "accuracy": f32[]}` (or either of them), on batches with
      `"mask"` f32[B] beside what training reads, 0 on padding; None: nothing is evaluated.
    - `dataset`: seed -> a `splitjax.data.Dataset`, for `splitjax train` and `profile`; None: these have no data.
    - `name`: what messages call it; by default what it was asked for by.

    Raises `ModelError` for a part that cannot be called.
    """

    init_fn: Callable[[jax.Array], Any]
    train_step: Callable[[Any, Any], tuple[Any, Any]]
    example: Callable[[int], Any]
    eval_step: Callable[[Any, Any], Mapping[str, Any]] | None = None
    dataset: Callable[[int], Dataset] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        for field, optional in (
            ("init_fn", False),
            ("train_step", False),
            ("example", False),
            ("eval_step", True),
            ("dataset", True),
        ):
            part = getattr(self, field)
            if not callable(part) and not (optional and part is None):
                raise ModelError(
                    f"{field} is a function",
                    value=part,
                    place=f"splitjax.models.OwnStep, {field}",
                    remedy="pass the function itself, not what it returns",
                )

    def shapes(self, batch_size: int) -> Any:
        """Returns the shapes of a training batch of `batch_size` examples, as `jax.ShapeDtypeStruct`s."""
        return jax.tree.map(_shape_of, self.example(batch_size))

    def state_shapes(self) -> Any:
        """Returns the shapes of the state, which is not made."""
        return jax.eval_shape(lambda: self.init_fn(jax.random.key(0)))

    def num_params(self) -> int:
        """Counts the numbers in the state's `"params"` (or `.params`), or in the whole state where it has none."""
        state = self.state_shapes()
        params = state.get("params", state) if isinstance(state, Mapping) else getattr(state, "params", state)
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


# Makes a model from options that are given as keywords.
ModelFactory: TypeAlias = Callable[..., ModelSpec | OwnStep]


def call_factory(
    which: str, factory: Callable[..., Any], library: str, options: Mapping[str, Any], place: str
) -> ModelSpec | OwnStep:
    """Calls a `factory` with `options`.

    **Arguments:** `which`: what it was asked for by. `library`: handed on where the factory has such an argument.
    `options`: its keywords. `place`: what an error names as its place.

    Raises `ModelError` for what cannot be called or lacks an option, for a factory that fails, and for a result that is
    no model or of the other library.
    """
    if not callable(factory):
        raise ModelError(
            "a model is made by a function of its options",
            value=factory,
            place=place,
            remedy=f"let {which} be a function that returns splitjax.models.from_linen(...) or OwnStep(...)",
        )
    options = _checked(which, factory, library, options, place)
    try:
        model = factory(**options)
    except SplitjaxError:
        raise
    except Exception as error:  # whatever a stranger's function raises
        raise ModelError(
            f"the model's factory fails: {type(error).__name__}: {error}",
            value=which,
            place=place,
            remedy="call it by hand to see where: --traceback shows the lines",
        ) from error
    if not isinstance(model, (ModelSpec, OwnStep)):
        raise ModelError(
            f"the model's factory returns {type(model).__name__}, which is no model",
            value=which,
            place=place,
            remedy="return splitjax.models.from_linen(...), from_nnx(...), build(...), or OwnStep(...)",
        )
    if library == "nnx" and (isinstance(model, OwnStep) or model.library != library):
        raise ModelError(
            "the model is not of the library nnx", value=which, place=place, remedy="leave the library out"
        )
    return dataclasses.replace(model, name=which) if isinstance(model, OwnStep) and not model.name else model


def _checked(
    which: str, factory: Callable[..., Any], library: str, options: Mapping[str, Any], place: str
) -> dict[str, Any]:
    """Returns the options that a factory is called with. Raises `ModelError` for those that it lacks or needs."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some builtins tell nothing
        return dict(options)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    names = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    given = {**options, "library": library} if "library" in names else dict(options)
    for name in given:
        if name not in names and not takes_all:
            raise ModelError(
                f"{which} has no such option{near(name, names)}",
                value=name,
                place=place,
                remedy=f"give some of {', '.join(names)}" if names else "give none",
            )
    for name in names:
        if name not in given and parameters[name].default is inspect.Parameter.empty:
            raise ModelError(
                f"{which} needs the option {name!r}",
                value=name,
                place=place,
                remedy=f"give it (--model-option {name}=...), or give it a default in the factory",
            )
    return given


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.canonicalize_dtype(np.result_type(leaf)))
