"""Makes a decorated training step, and the shapes that it is planned with, from a model's name on the command line."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import optax

import splitjax
from splitjax.auto_mesh import AutoMesh, AutoWord
from splitjax.cli._options import Library, ModelName, OptimizerName, RematText
from splitjax.mesh import MeshShape
from splitjax.roles import Role

if TYPE_CHECKING:
    from splitjax import models


@dataclasses.dataclass(frozen=True)
class Planned:
    """Holds a decorated step with abstract arguments: nothing of the model is allocated.

    - `step`: decorated by `splitjax.parallelize` or `splitjax.nnx.parallelize`.
    - `arguments`: states first, then the batch, as `jax.ShapeDtypeStruct`s.
    - `title`: names the model, its size and its optimizer.
    """

    step: Any
    arguments: tuple[Any, ...]
    title: str


def optimizer_named(name: OptimizerName, learning_rate: Any = 1e-3) -> optax.GradientTransformation:
    """Returns the optimizer called `name`, with a `learning_rate` that is a number or a schedule."""
    if name == "momentum":
        return optax.sgd(learning_rate, momentum=0.9)
    return {"adam": optax.adam, "adafactor": optax.adafactor, "adagrad": optax.adagrad}[name](learning_rate)


@dataclasses.dataclass(frozen=True)
class ModelChoice:
    """Says which model is asked for.

    - `name`, `library`, `num_classes`, `width`: as of `splitjax.models.make_model`; None for the model's own.
    - `options`: further options of the model, by name.
    """

    name: ModelName
    library: Library
    num_classes: int | None
    width: float | None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def make(self) -> models.ModelSpec | models.OwnStep:
        """Makes the model. Raises what `splitjax.models.make_model` raises."""
        from splitjax import models

        named = {"num_classes": self.num_classes, "width": self.width}
        given = {name: value for name, value in named.items() if value is not None}
        return models.make_model(self.name, library=self.library, place="--model", **{**given, **self.options})


@dataclasses.dataclass(frozen=True)
class LayoutChoice:
    """Says how the step is laid out.

    - `mesh`: its axes with their sizes, or how many devices it is chosen for. `roles`: what was said of its axes.
    - `rules`, `group_comm`, `shard_state`, `memory_budget`, `target`, `microbatches`, `remat`, `compile_best`: as of
      `splitjax.parallelize`.
    """

    mesh: MeshShape | AutoMesh
    roles: Mapping[str, Role]
    rules: str
    group_comm: str = "auto"
    shard_state: bool | AutoWord = False
    memory_budget: int | None = None
    target: str | pathlib.Path | None = None
    microbatches: int | AutoWord | None = None
    remat: RematText | None = None
    compile_best: int = 0


def planned_step(model: ModelChoice, layout: LayoutChoice, optimizer: OptimizerName, batch_size: int) -> Planned:
    """Returns the decorated training step of a model, and the shapes of its arguments.

    **Arguments:**

    - `model`, `layout`: which model, and how its step is laid out.
    - `optimizer`: its name, for a model that does not bring its own step.
    - `batch_size`: examples in the global batch.

    Raises `ModelError` for an option that the model lacks, and what `splitjax.models.make_model` raises.
    """
    from splitjax import models

    spec = model.make()
    options = {
        "mesh": layout.mesh if isinstance(layout.mesh, AutoMesh) else dict(layout.mesh.axes),
        "rules": layout.rules,
        "roles": layout.roles,
        "group_comm": layout.group_comm,
        "shard_state": layout.shard_state,
        "memory_budget": layout.memory_budget,
        "target": layout.target,
        "microbatches": layout.microbatches,
        "remat": layout.remat,
        "compile_best": layout.compile_best,
    }
    if isinstance(spec, models.OwnStep):
        step = splitjax.parallelize(spec.train_step, **options)
        title = f"{spec.name} (a step of its own, {spec.num_params():,} parameters)"
        return Planned(step, (spec.state_shapes(), spec.shapes(batch_size)), title)
    batch = spec.example(batch_size)
    key = jax.eval_shape(lambda: jax.random.key(0))
    chosen = optimizer_named(optimizer)
    title = f"{model.name} ({spec.library}, {spec.num_params():,} parameters), {optimizer}"
    if spec.library == "nnx":
        from flax import nnx

        init_fn, train_step, _ = models.make_nnx_step(spec, chosen, value_and_grad=splitjax.nnx.value_and_grad)
        step = splitjax.nnx.parallelize(train_step, **options)
        return Planned(step, (*nnx.eval_shape(init_fn, key), batch), title)
    init_fn, train_step, _ = models.make_step(spec, chosen, value_and_grad=splitjax.value_and_grad)
    step = splitjax.parallelize(train_step, **options)
    return Planned(step, (jax.eval_shape(init_fn, key), batch), title)
