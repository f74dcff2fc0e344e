"""Walks nested jaxprs: every equation once, in program order, with the calls and loops around it.

A jaxpr goes in; visits come out, or the equation at a site. A `site` names an equation by indices from the outermost
jaxpr inwards: `(12, 0, 3)` is the fourth equation of the first sub-jaxpr of the thirteenth equation. The walk that
makes the flat operations of a step (`trace.flatten`) and the rooms that edit or evaluate it number the same jaxprs so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from splitjax import _compat
from splitjax.primitives.calls import BOUNDARY, CallKind, kind_of, names, num_trips

Site = tuple[int, ...]
_WHILES, _CONDS = names(CallKind.WHILE), names(CallKind.COND)
_LOOPS = _WHILES | names(CallKind.SCAN)


@dataclasses.dataclass(frozen=True, slots=True)
class Visit:
    """Says where a walk stands.

    - `site`, `eqn`: the equation, and its site.
    - `around`: the equations that hold it, outermost first.
    - `trips`: how often it runs per run of the outermost jaxpr: the lengths of the scans around it, multiplied.
    - `is_conditional`: whether it may not run at all: it stands in a branch, or in a loop that ends when it wants to.
    - `in_boundary`: whether it belongs to the forward computation of a gradient boundary.
    """

    site: Site
    eqn: Any
    around: tuple[Any, ...] = ()
    trips: int = 1
    is_conditional: bool = False
    in_boundary: bool = False

    @property
    def not_inline(self) -> Any | None:
        """The outermost equation around it that is more than an inlined call: a loop, a branch, a rematerialised call;
        None where it runs exactly as if it stood in the outermost jaxpr."""
        return next((eqn for eqn in self.around if kind_of(eqn) is not CallKind.INLINE), None)


def bodies(eqn: Any) -> list[Any]:
    """Returns the jaxprs that the equation `eqn` holds, in the order in which sites number them.

    Those of equations that are no calls are among them. A body that is in Python alone (`call_hi_primitive`) is not.
    """
    held: list[Any] = []
    for value in eqn.params.values():
        if isinstance(value, (tuple, list)):
            # Shapes and the like, which most parameters are, are told by their first element.
            if value and type(value[0]) is not int:
                held += [body for body in value if isinstance(body, _compat.JAXPR_TYPES)]
        elif isinstance(value, _compat.JAXPR_TYPES):
            held.append(value)
    if held and eqn.primitive.name in _WHILES:
        return [eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]]
    return held


def everywhere(visit: Visit) -> bool:
    """Enters every equation that holds jaxprs."""
    return True


def walk(jaxpr: Any, enter: Callable[[Visit], bool] = everywhere) -> Iterator[Visit]:
    """Yields a visit for every equation of `jaxpr` in program order, an equation before those that it holds.

    **Arguments:**

    - `jaxpr`: open or closed.
    - `enter`: tells of a visit to an equation that holds jaxprs whether to go into them; by default into all.
    """
    yield from _walk(jaxpr, Visit((), None), enter)


def walk_inside(eqn: Any, enter: Callable[[Visit], bool] = everywhere) -> Iterator[Visit]:
    """Yields a visit for every equation that `eqn` holds, as `walk` does; sites begin with the number of its body."""
    yield from _inside(Visit((), eqn), bodies(eqn), enter)


def _walk(jaxpr: Any, outer: Visit, enter: Callable[[Visit], bool], only_holders: bool = False) -> Iterator[Visit]:
    """As `walk`, from the place `outer`; with `only_holders` without what holds no jaxpr, which is nearly all."""
    for index, eqn in enumerate(_compat.open_jaxpr(jaxpr)[0].eqns):
        inner = bodies(eqn) if eqn.params else ()
        if only_holders and not inner:
            continue
        visit = Visit((*outer.site, index), eqn, outer.around, outer.trips, outer.is_conditional, outer.in_boundary)
        yield visit
        if inner and enter(visit):
            yield from _inside(visit, inner, enter, only_holders)


def _inside(
    visit: Visit, inner: Sequence[Any], enter: Callable[[Visit], bool], only_holders: bool = False
) -> Iterator[Visit]:
    name = visit.eqn.primitive.name
    trips = num_trips(visit.eqn) if name in _LOOPS else 1
    for number, body in enumerate(inner):
        around = Visit(
            (*visit.site, number),
            None,
            (*visit.around, visit.eqn),
            visit.trips * (1 if trips is None else trips),
            visit.is_conditional or name in _CONDS or trips is None,
            visit.in_boundary or name == BOUNDARY,
        )
        yield from _walk(body, around, enter, only_holders)


def _is_no_boundary(visit: Visit) -> bool:
    return visit.eqn.primitive.name != BOUNDARY


def boundaries(jaxpr: Any, enter: Callable[[Visit], bool] = _is_no_boundary) -> Iterator[Visit]:
    """Yields the visits of the gradient boundaries of `jaxpr`, by default without those in the forward of another.
    `enter`: as for `walk`."""
    visits = _walk(jaxpr, Visit((), None), enter, only_holders=True)
    return (visit for visit in visits if visit.eqn.primitive.name == BOUNDARY)


def holds_boundary(eqn: Any) -> bool:
    """Returns whether a gradient boundary lies inside the call `eqn` (a step that scans over updates, say)."""
    visits = _inside(Visit((), eqn), bodies(eqn), _is_no_boundary, only_holders=True)
    return any(visit.eqn.primitive.name == BOUNDARY for visit in visits)


def equation_at(jaxpr: Any, site: Site) -> Any:
    """Returns the equation of `jaxpr` at `site`, or None where the jaxpr has no such equation."""
    inner, _ = _compat.open_jaxpr(jaxpr)
    if not site or site[0] >= len(inner.eqns):
        return None
    eqn = inner.eqns[site[0]]
    if len(site) == 1:
        return eqn
    inner_jaxprs = bodies(eqn)
    return equation_at(inner_jaxprs[site[1]], site[2:]) if site[1] < len(inner_jaxprs) else None


def with_changed_body(jaxpr: Any, prefix: Site, change: Callable[[Any], Any]) -> Any:
    """Returns `jaxpr` with the body to which `prefix` leads, the number of an equation before that of its body, as
    `change` makes it."""
    if not prefix:
        return change(jaxpr)
    inner, _ = _compat.open_jaxpr(jaxpr)
    eqn = inner.eqns[prefix[0]]
    before = bodies(eqn)[prefix[1]]
    after = with_changed_body(before, prefix[2:], change)
    swap = lambda value: after if value is before else value
    params = {
        name: type(value)(map(swap, value)) if isinstance(value, (tuple, list)) else swap(value)
        for name, value in eqn.params.items()
    }
    eqns = [*inner.eqns[: prefix[0]], eqn.replace(params=params), *inner.eqns[prefix[0] + 1 :]]
    return _compat.like_jaxpr(jaxpr, inner.replace(eqns=eqns))
