"""Lets a decorated function be a method: `self.step` is the step of that object.

A function that was decorated in the body of a class, and an object, come in; the decorated method of the object comes
out. It is made once an object, so that its programs are kept, and its arguments are counted without `self`. The object
is part of the program, as what a step closes over is.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from splitjax.step.options import OptionError

Step = TypeVar("Step")


class Methods:
    """Holds the decorated methods that a decorated function has become, one for each object that it was looked up on.

    **Arguments:** `fn`: the function as the user wrote it. `decorate`: decorates another function in the same way; None
    where it cannot be a method (a step made by `like`). `over_modules`: whether its arguments are modules, so that an
    object which holds arrays has to be one of them.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        decorate: Callable[[Callable[..., Any]], Any] | None,
        over_modules: bool = False,
    ) -> None:
        self._fn, self._decorate, self._over_modules = fn, decorate, over_modules
        self._steps: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def of(self, step: Step, instance: Any, owner: type | None) -> Step:
        """Returns what `step`, the decorated function, is when it is looked up on `instance`, an object of the class
        `owner`; on the class itself where `instance` is None.

        Raises `OptionError` for an object that cannot be referred to weakly, and for a module whose arrays would be
        constants of the step."""
        bind = getattr(type(self._fn), "__get__", None)
        if bind is None or self._decorate is None or isinstance(self._fn, staticmethod):
            return step
        bound = bind(self._fn, instance, owner)
        target = getattr(bound, "__self__", None)
        if not inspect.ismethod(bound) or target is None:
            return step
        if self._over_modules and any(leaf is not target for leaf in jax.tree.leaves(target)):
            raise OptionError(
                "a step cannot be a method of the module that it trains: the module has to be an argument",
                value=type(target).__name__,
                place=f"{type(target).__name__}.{bound.__name__}",
                remedy="write the step as a function outside of the class, with the module as its first argument",
            )
        key = id(target)
        if key not in self._steps:
            try:
                reference = weakref.ref(target, lambda _: self._steps.pop(key, None))
            except TypeError:
                raise OptionError(
                    "a decorated method needs an object that can be referred to weakly, to be compiled once for it",
                    value=type(target).__name__,
                    place=f"{type(target).__name__}.{bound.__name__}",
                    remedy='add "__weakref__" to its __slots__, or decorate a function of its own and call that',
                ) from None
            self._steps[key] = (reference, self._decorate(_weak_method(bound)))
        # The step itself knows the object weakly, so that both can go; who has the method has the object.
        method = copy.copy(self._steps[key][1])
        method._owner = target
        return method


def _weak_method(bound: Any) -> Callable[..., Any]:
    """Returns the method `bound` as a function that does not keep its object alive."""
    find = weakref.WeakMethod(bound)

    def call(*args: Any, **kwargs: Any) -> Any:
        method = find()
        assert method is not None, "the step of a method is called through its object"
        return method(*args, **kwargs)

    functools.update_wrapper(call, bound)
    call.__dict__["__wrapped__"] = bound.__func__  # not the method, and with it the object
    call.__dict__["__signature__"] = inspect.signature(bound)
    return call
