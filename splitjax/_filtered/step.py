"""Runs a step over objects as a plain parallel step over their arrays: what the NNX and Equinox frontends share.

A frontend takes a call's arguments apart (`_pack`): arrays go to a plain `ParallelStep`, everything else becomes part
of one static argument, `Static`, so that a program serves exactly the calls that agree in it. What the step returns is
taken apart the same way inside the trace, and put together again after the call: its static part travels in the
result's tree structure (`Extra`), the only thing about a traced result that is not an array.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Self, TypeVar, cast

import jax
import jax.numpy as jnp

from splitjax import _compat
from splitjax._filtered.call import Call
from splitjax._filtered.options import SharedChoice
from splitjax._filtered.questions import AskedStep, P, R
from splitjax.choosing import Choice
from splitjax.compile.entry import CompileRecord
from splitjax.compile.session import Session
from splitjax.errors import DonatedStateError, PlanError, StateError
from splitjax.mesh import with_devices
from splitjax.parallel_step import ParallelStep
from splitjax.parallelize import parallelize as parallelize_arrays
from splitjax.planning.carried import Carried
from splitjax.roles import Role, read_roles
from splitjax.step.consumed import CallLog
from splitjax.step.methods import Methods
from splitjax.step.padding.stored import with_padding
from splitjax.step.positions import ArgumentRoles, in_place_of, keyword_only, positional, traced_as, with_states
from splitjax.step.traced import naming_axes
from splitjax.step.words import step_words

S = TypeVar("S")


class FilteredStep(AskedStep[P, R]):
    """A decorated step over modules. Call it like the function it wraps."""

    changes_states: bool = False  # in place, as NNX does; else it returns new ones
    __name__: str
    __wrapped__: Callable[P, R]

    def __init__(
        self,
        fn: Callable,
        options: ArgumentRoles,
        keywords: dict[str, Any],
        state_outnums: Any = None,
        parent: FilteredStep[..., Any] | None = None,
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._name = getattr(fn, "__name__", type(fn).__name__)
        self._keyword_only = keyword_only(fn)
        self._options = options
        self._keywords = keywords
        self._state_outnums = state_outnums
        self._parent = parent
        self._donates = parent is None and keywords["donate"]
        self._steps: dict[Any, ParallelStep] = {}
        self._shared = SharedChoice(self._name, keywords, self._steps)
        self._used: list[ParallelStep] = []
        self._kept = Session()
        self._log = CallLog()
        self._methods = Methods(fn, None)

    def _as_method(self, decorate: Callable[[Callable[..., Any]], Any]) -> Self:
        """Lets the step be a method of a class. `decorate`: decorates another function with the same options."""
        self._methods = Methods(self._fn, decorate, over_modules=True)
        return self

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Returns the step of an object whose class has it as a method; see `ParallelStep.__get__`."""
        return self._methods.of(self, instance, owner)

    @property
    def mesh(self) -> jax.sharding.Mesh | jax.sharding.AbstractMesh:
        """The mesh as it was given, or made of its sizes when it is first needed. What `mesh="auto"` chose is there
        once a call was planned; before that it is a `MeshError`."""
        return self._parent.mesh if self._parent is not None else self._shared.mesh

    @property
    def choice(self) -> Choice | None:
        """How `rules="auto"` or `mesh="auto"` chose; see `ParallelStep.choice`."""
        return self._parent.choice if self._parent is not None else self._shared.choice

    @property
    def roles(self) -> Mapping[str, Role]:
        """Says what mesh axes are for, as far as the user said so."""
        return self._parent.roles if self._parent is not None else read_roles(self._keywords.get("roles"), "roles")

    @property
    def options(self) -> ArgumentRoles:
        """Says which arguments are states, batches and static, and which results are states; no state or batch
        arguments where the frontend finds them in a call."""
        given = self._state_outnums
        outnums = None if given is None else (given,) if hasattr(given, "__index__") else tuple(given)
        return dataclasses.replace(self._options, state_outnums=outnums)

    @property
    def compiles(self) -> tuple[CompileRecord, ...]:
        """Every program this step was planned for, each with the reason why the earlier ones did not serve."""
        records = [record for step in self._steps.values() for record in step.compiles]
        return tuple(dataclasses.replace(record, number=n) for n, record in enumerate(records, 1))

    def __repr__(self) -> str:
        asked = (self._parent or self)._shared.keywords
        return step_words(self._name, asked["mesh"], asked["rules"], len(self.compiles))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._call(args, kwargs, sys._getframe(1))

    @_compat.outside_mesh
    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Any:
        """Runs one call, made in `frame`."""
        if kwargs or self._keyword_only:
            args = positional(self._fn, args, kwargs)
        call = self._pack(args)
        try:
            result = call.step(*(call.unshared() if self._donates else call.args))
        except DonatedStateError as error:
            raise self._donated(args, call) from error
        self._log.count()
        for number in self._options.state_argnums[:1]:
            self._log.note(args[number], frame)
        return self._unpack(call, result)

    def carried(self) -> Carried:
        """Returns what the step keeps between its calls besides its states; see `ParallelStep.carried`."""
        seen = dict(self._kept.resumed)
        for step in self._steps.values():
            seen |= step.carried().seen
        return Carried(seen, dict(self._kept.residuals), self._kept.num_steps)

    def resume(self, carried: Carried | None) -> None:
        """Puts back what `carried` gave; see `ParallelStep.resume`."""
        carried = carried or Carried()
        self._kept.residuals, self._kept.resumed, self._kept.num_steps = (
            dict(carried.residuals),
            dict(carried.seen),
            carried.num_steps,
        )
        for step in self._steps.values():
            step.resume(carried)

    @_compat.outside_mesh
    def init(self, make_fn: Callable[..., S], *make_args: Any, example: Sequence[Any]) -> S:
        """Creates the states already sharded: `make_fn(*make_args)` is compiled with the plan's shardings as its
        results', so that no device ever holds the whole.

        **Arguments:**

        - `make_fn`: `make_fn(key)` returns the state, or the states in order.
        - `example`: all other arguments of the step, in order: arrays or `ShapeDtypeStruct`s.
        """
        call, single = self._planned(make_fn, make_args, example)
        stored = call.stored(call.made)
        with_devices(self.mesh, f"{self._name}.init")

        def create(*args: Any) -> list[jax.Array]:
            made = self._made(self._making(make_fn)(*args), example)[0].made_leaves
            return [with_padding(_strong(leaf), like) for leaf, like in zip(made, stored, strict=True)]

        states = call.rebuild(jax.jit(create, out_shardings=[leaf.sharding for leaf in stored])(*make_args))
        return cast("S", states[0] if single else states)

    @_compat.outside_mesh
    def abstract_state(self, make_fn: Callable, *make_args: Any, example: Sequence[Any]) -> Any:
        """Describes the states that `make_fn(*make_args)` makes: `ShapeDtypeStruct`s with shardings for arrays, for
        one's own orbax restore. `example`: all other arguments of the step, in order. Nothing is computed."""
        call, single = self._planned(make_fn, make_args, example)
        states = call.rebuild(call.stored(call.made))
        return states[0] if single else states

    def logical(self, *states: Any) -> Any:
        """Returns `states`, in order, without the padding that `uneven="pad"` stores them with: in the sizes that the
        step knows, for checkpoints and tools of one's own. New states: the given ones stay as they are. Descriptions
        (`abstract_state`) serve too. `stored` is the way back, and the step itself takes both. Returns one state, or a
        tuple of them."""
        return self._changed(states, lambda step: step._programs.logical)

    def stored(self, *states: Any) -> Any:
        """Returns `states`, in order, with the padding that `uneven="pad"` stores them with, laid out as the plan says:
        the inverse of `logical`. Returns one state, or a tuple of them."""
        return self._changed(states, lambda step: step._programs.stored)

    def _changed(self, states: tuple[Any, ...], way: Callable[[ParallelStep], Callable[[int, Any], Any]]) -> Any:
        """Returns states with their arrays changed by a way of the plain step that was used last."""
        changed = self._over_states(states, way(self._used[-1])) if self._used else states
        return changed[0] if len(changed) == 1 else changed

    def _planned(self, make_fn: Callable, make_args: tuple, example: Sequence[Any]) -> tuple[Call, bool]:
        """The call over abstract states, outside any trace, and whether `make_fn` returns a lone state."""
        made = []

        def describe(*args: Any) -> list[Any]:
            made.append(self._made(self._making(make_fn)(*args), example))
            return made[-1][0].made_leaves

        shapes = jax.eval_shape(traced_as(make_fn, describe), *make_args)
        call, single = made[-1]
        states = call.rebuild([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in shapes])
        return self._pack(self._arguments(states, example)), single

    def _making(self, make_fn: Callable) -> Callable:
        """Returns `make_fn`, which may name axes of the mesh."""
        mesh = self.mesh if self._parent is not None else self._shared.nameable
        return naming_axes(make_fn, mesh, f"{self._name}.init")

    def _made(self, states: Any, example: Sequence[Any]) -> tuple[Call, bool]:
        single = self._is_single(states)
        return self._pack(self._arguments((states,) if single else tuple(states), example)), single

    def _is_single(self, states: Any) -> bool:
        numbers = self._options.state_argnums
        if len(numbers) == 1:
            return True
        if type(states) not in (tuple, list) or len(states) != len(numbers):
            raise StateError(
                f"make_fn must return the {len(numbers)} states in state_argnums order",
                value=type(states).__name__,
                place=f"{self._name}.init",
                remedy="return a tuple with one state per state argument",
            )
        return False

    def _arguments(self, states: Sequence[Any], example: Sequence[Any]) -> tuple:
        """The step's whole argument list: states in their places, the example's arguments in the others."""
        numbers = self._state_positions(len(states))
        if len(numbers) != len(states):
            raise StateError(
                f"got {len(states)} states, the step has {len(numbers)}",
                value=numbers,
                place=f"{self._name}",
                remedy="give one state per state argument, in order",
            )
        return with_states(self._fn, numbers, states, example)

    def _batch_positions(self, args: tuple) -> tuple[int, ...]:
        """Returns which arguments are batches."""
        return self._options.batch_argnums

    def _state_positions(self, count: int) -> tuple[int, ...]:
        return self._options.state_argnums

    def _step(self, key: Any, make: Callable[[], tuple[Callable, dict[str, Any]]]) -> ParallelStep:
        """The plain step for one arrangement of arguments; `make` returns the function over arrays, and its numbers."""
        step = self._steps.get(key)
        if step is None:
            fn, numbers = make()
            in_place_of(self._fn, fn).__name__ = fn.__qualname__ = self._name
            if self._parent is None:
                step = parallelize_arrays(fn, **self._shared.keywords, **numbers)
            elif not self._parent._used:
                raise PlanError(
                    "the training step has no plan yet, so there is nothing to be like",
                    place=f"{self._name}, made by like()",
                    remedy="call init, place, plan or the training step itself first",
                )
            else:
                numbers.pop("state_outnums", None)
                step = self._parent._used[-1].like(fn, **numbers)
            step._programs.kept = self._kept
            self._steps[key] = step
        self._used[:] = [step]
        return step

    def _donated(self, args: tuple, call: Call) -> DonatedStateError:
        """The plain step's error, said of the user's own arguments."""
        states = self._options.state_argnums
        where = self._log.place_of(args[states[0]]) if states else "an earlier call"
        return DonatedStateError(
            f"a state of {self._name} was consumed by {where}; its arrays are gone",
            value=call.first_deleted(),
            place=f"call of {self._name}",
            remedy="use the states that the call returned, or pass donate=False to keep the old ones",
        )

    # What a frontend adds.

    @abc.abstractmethod
    def _over_states(self, states: tuple[Any, ...], change: Callable[[int, Any], Any]) -> tuple[Any, ...]:
        """Returns the states with what `change` makes of (position, arrays) of each among the plain step's
        arguments."""

    @abc.abstractmethod
    def _unpack(self, call: Call, result: Any) -> Any:
        """Puts what the plain step returned together again."""


def _strong(leaf: Any) -> jax.Array:
    """An array without a weak type, which would make the second call another program."""
    leaf = _compat.forget_mesh(jnp.asarray(leaf), explicit_only=True)
    return leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) else jax.lax.convert_element_type(leaf, leaf.dtype)
