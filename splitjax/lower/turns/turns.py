"""Runs the split layers of a boundary forward and backward one turn at a time: group communication in turns.

The forward is cut where examples cross into split layers (`cut.py`). The front runs once, as ever; the back runs in as
many turns as a group has workers, each with its own slice of the crossing activations (`fetch.py`), and adds up the
gradients of its parameters (`microbatch.py`); then the front is differentiated with the cotangents of all turns.
Activations of the split layers exist for one turn at a time. Lai et al., "SplitBrain" (arXiv 2112.15317); Krizhevsky
(arXiv 1404.5997, section 4.1).

`take_turns` makes a `TurnedBoundary` of a boundary's equation, `evaluate_turns` gives its results. What cannot run in
turns is refused with the reason: a loss that mixes examples after they have crossed, say.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from splitjax import _compat
from splitjax.errors import Refusal
from splitjax.lower.microbatch.batch_split import Split
from splitjax.lower.microbatch.loop import MakeFetch, PreparedBoundary
from splitjax.lower.microbatch.microbatch import Accumulation, prepare
from splitjax.lower.microbatch.worker_loop import OperandFetch
from splitjax.lower.products.groups import Copies, Product
from splitjax.lower.products.interpret import evaluate_equation, evaluate_part
from splitjax.lower.turns.cut import Cut, FlatForward, ForwardPart, cut_forward, flatten_calls
from splitjax.lower.turns.fetch import FETCHES
from splitjax.planning.sites.exchange import EXAMPLES, SCATTER, SPLIT, SWAP, Exchange
from splitjax.planning.sites.layout import SiteLayout, StepLayout
from splitjax.planning.sites.mesh_context import MeshContext
from splitjax.planning.workers import Workers
from splitjax.primitives.example_relation import ExampleDim
from splitjax.primitives.walk import Site
from splitjax.step.boundary import Boundary, boundary_forward, boundary_of


@dataclasses.dataclass(frozen=True)
class Mode:
    """Tells how a step's boundaries are asked to run in turns.

    - `kind`: `modulo` or `turns`, as `group_comm`.
    - `workers`: who share the batch. Over their axes every parameter is whole, so that the loop over turns handles them
      itself and gradients are exchanged over them once.
    - `num_examples`: those of the whole batch.
    """

    kind: str
    workers: Workers
    num_examples: int

    def in_turn(self, group: tuple[str, ...]) -> Workers:
        """Returns the workers as they share the examples of one turn, where layers are split over `group`."""
        if self.kind == "modulo":
            return self.workers
        left = tuple(axis for axis in self.workers.batch_axes if axis not in group)
        return dataclasses.replace(self.workers, batch_axes=left)


@dataclasses.dataclass(frozen=True, eq=False)
class TurnedBoundary:
    """Holds a boundary that is cut for turns.

    - `mode`: how it runs. `site`: its place in the step. `group`: the axes that split the layers.
    - `boundary`: its equation. `flat`: its forward with calls inlined. `cut`: where that is cut.
    - `front`, `back`: the parts of the forward. `twin`: the back, traced with the examples of one turn.
    - `operand_dims`: per operand of the back, where it holds examples; None where it does not.
    - `exchanges`: the planned exchanges, by site within the forward.
    """

    mode: Mode
    site: Site
    group: tuple[str, ...]
    boundary: Boundary
    cut: Cut
    flat: FlatForward
    front: ForwardPart
    back: ForwardPart
    twin: ForwardPart
    operand_dims: tuple[int | None, ...]
    exchanges: Mapping[Site, Exchange]

    @property
    def num_turns(self) -> int:
        """The number of turns: that of the workers of a group."""
        return self.mode.workers.mesh.size(self.group)

    @property
    def num_operands(self) -> int:
        """The number of operands of the boundary; crossing values are the back's operands behind these."""
        return len(self.flat.invars)

    @functools.cached_property
    def differentiated(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The positions of operands that are differentiated in front and back (crossing values count on)."""
        used = []
        for part in (self.front, self.back):
            inner, _ = _compat.open_jaxpr(part.jaxpr)
            read = {v for eqn in inner.eqns for v in eqn.invars if not isinstance(v, _compat.Literal)} | set(
                inner.outvars
            )
            used.append({p for p, v in enumerate(inner.invars) if v in read})
        own = self.boundary.positions
        live = tuple(self.num_operands + k for k, is_live in enumerate(self.cut.live) if is_live)
        return tuple(p for p in own if p in used[0]), (*(p for p in own if p in used[1]), *live)

    @property
    def back_params(self) -> dict[str, Any]:
        """The parameters of a boundary equation whose forward is the back."""
        names = (*self.boundary.names, *("crossing",) * len(self.cut.crossing))
        return {
            **{field.name: getattr(self.boundary, field.name) for field in dataclasses.fields(self.boundary)},
            "forward": self.back.jaxpr,
            "positions": self.differentiated[1],
            "microbatches": self.num_turns,
            "names": names,
        }

    def prepared(self) -> PreparedBoundary | Refusal:
        """Returns the back, analysed to run in a loop over turns; a refusal where what follows the crossing is no sum
        over examples."""
        loop = Accumulation(
            self.operand_dims,
            self.twin.jaxpr,
            self.num_turns,
            self.mode.in_turn(self.group),
        )
        job = prepare(self.back_params, loop)
        return Refusal("the loss does not depend on what crosses") if job is None else job


def take_turns(eqn: Any, twin: Any, site: Site, layout: SiteLayout, mode: Mode) -> TurnedBoundary | Refusal | None:
    """Cuts a boundary for turns; returns None where nothing crosses in it.

    **Arguments:**

    - `eqn`: the boundary's equation. `twin`: the same boundary's, traced with the examples of one turn.
    - `site`: its place in the step. `layout`: the step's layout, with its exchanges.
    - `mode`: how the step's boundaries run in turns.

    Returns a refusal where the boundary cannot run so.
    """
    boundary = boundary_of(eqn.params)
    prefix = (*site, 0)
    exchanges = {
        exchange.site[len(prefix) :]: exchange
        for exchange in layout.exchanges.values()
        if exchange.site[: len(prefix)] == prefix
    }
    if not exchanges:
        return None
    if boundary.microbatches not in (None, 1):
        return Refusal(f"the gradient is accumulated over {boundary.microbatches} microbatches already")
    flat, small = flatten_calls(boundary.forward), flatten_calls(boundary_forward(twin)[0])
    if [e.primitive for e in flat.eqns] != [e.primitive for e in small.eqns]:
        return Refusal("the loss is another program for the examples of one turn")
    cut = cut_forward(flat, boundary.positions, exchanges, _holding_examples(flat, small))
    if cut is None:
        if any(exchange.enter in (EXAMPLES, SWAP) for exchange in exchanges.values()):
            return Refusal("examples cross inside a loop or a rematerialised function")
        return None
    entering = {flat.sites[index] for readers in cut.readers for index in readers}
    later = [exchange for at, exchange in exchanges.items() if at not in entering]
    refusal = _whole_layer_behind(layout, prefix, [flat.sites[index] for index in cut.back], later)
    if refusal is not None:
        return refusal
    groups = {exchanges[at].axes for at in entering or exchanges}
    if len(groups) > 1:
        return Refusal(
            f"layers are split over different groups: {', '.join(sorted('+'.join(axes) for axes in groups))}"
        )
    (front, rear), (_, twin_rear) = cut.parts(flat), cut.parts(small)
    dims = _operand_dims(rear, twin_rear, cut, mode.num_examples, flat, exchanges)
    if isinstance(dims, Refusal):
        return dims
    return TurnedBoundary(mode, site, groups.pop(), boundary, cut, flat, front, rear, twin_rear, dims, exchanges)


def _whole_layer_behind(
    layout: SiteLayout, prefix: Site, back: Sequence[Site], later: Sequence[Exchange]
) -> Refusal | None:
    """Returns a refusal where a layer that is whole on every device stands behind the crossing.

    There, each turn would exchange its gradients. `back`: the sites of the back; `later`: the exchanges that no
    crossing value enters."""
    for exchange in later:
        if exchange.enter in (EXAMPLES, SWAP) or exchange.leave == SCATTER:
            return Refusal(f"a replicated layer stands between split layers, around {exchange.layer}")
    for use in layout.uses:
        inside = use.site[len(prefix) :]
        if not use.axes and use.site[: len(prefix)] == prefix and any(inside[: len(site)] == site for site in back):
            return Refusal(
                f"{use.layer}, which every device holds whole, stands behind the crossing or in one loop or remat"
                " with it"
            )
    return None


def _holding_examples(flat: FlatForward, small: FlatForward) -> set[Any]:
    """Returns the variables whose shapes depend on the number of examples."""
    pairs = list(zip(flat.invars, small.invars, strict=True))
    for a, b in zip(flat.eqns, small.eqns, strict=True):
        pairs += zip(a.outvars, b.outvars, strict=True)
    return {a for a, b in pairs if getattr(a.aval, "shape", ()) != getattr(b.aval, "shape", ())}


def _operand_dims(
    rear: ForwardPart,
    small: ForwardPart,
    cut: Cut,
    num_examples: int,
    flat: FlatForward,
    exchanges: Mapping[Site, Exchange],
) -> tuple[int | None, ...] | Refusal:
    """Returns, for each operand of the back, the dim that holds its examples.

    Returns a refusal for crossing values that mix examples with other dims."""
    whole, part = _compat.open_jaxpr(rear.jaxpr)[0], _compat.open_jaxpr(small.jaxpr)[0]
    num_operands = len(flat.invars)
    dims: list[int | None] = []
    for position, (a, b) in enumerate(zip(whole.invars, part.invars, strict=True)):
        differ = [d for d, (x, y) in enumerate(zip(a.aval.shape, b.aval.shape, strict=True)) if x != y]
        dims.append(differ[0] if differ else None)
        if position < num_operands or not differ:
            continue
        readers = cut.readers[position - num_operands]
        known = readers and exchanges[flat.sites[readers[0]]].example_dim == differ[0]
        if len(differ) > 1 or not (known or a.aval.shape[differ[0]] == num_examples):
            return Refusal(f"a value of shape {a.aval.shape} crosses whose examples are mixed with other dims")
    return tuple(dims)


def evaluate_turns(
    turned: TurnedBoundary, job: PreparedBoundary, operands: Sequence[Any], layout: StepLayout
) -> list[Any]:
    """Evaluates the boundary `turned` on its `operands`: its value, aux leaves and gradients.

    `job`: its back, as `TurnedBoundary.prepared` gives it; `layout`: the step's layout."""
    prefix = (*turned.site, 0)
    in_front, in_back = turned.differentiated
    copies: Copies = {}

    def front(differentiated):
        merged = list(operands)
        for position, value in zip(in_front, differentiated, strict=True):
            merged[position] = value
        values = evaluate_part(layout, turned.front.jaxpr, merged, prefix, turned.front.sites, {})
        crossing, rest = values[: len(turned.cut.crossing)], values[len(turned.cut.crossing) :]
        live = [value for value, is_live in zip(crossing, turned.cut.live, strict=True) if is_live]
        return live, (
            [None if is_live else value for value, is_live in zip(crossing, turned.cut.live, strict=True)],
            rest,
        )

    live, pull, (known, rest) = jax.vjp(front, [operands[p] for p in in_front], has_aux=True)
    alive = iter(live)
    crossing = [next(alive) if is_live else value for value, is_live in zip(known, turned.cut.live, strict=True)]
    inside = _inside(turned, layout)
    bind = lambda eqn, values, at: evaluate_equation(inside, eqn, values, (*prefix, *turned.back.site(at)), copies)
    results = job.placed(layout.mesh, bind, bind).results(
        [*operands, *crossing],
        in_back,
        _fetches(turned, inside.where, copies),
        turned.group,
    )
    num_results = sum(turned.cut.outputs)
    computed, grads = iter(results[:num_results]), dict(zip(in_back, results[num_results:], strict=True))
    cotangents = [grads[turned.num_operands + k] for k, is_live in enumerate(turned.cut.live) if is_live]
    (to_front,) = pull([c.astype(value.dtype) for c, value in zip(cotangents, live, strict=True)])
    of_front = iter(rest)
    values = [
        v.val if isinstance(v, _compat.Literal) else next(computed) if back else next(of_front)
        for v, back in zip(turned.flat.outvars, turned.cut.outputs, strict=True)
    ]
    by_front = dict(zip(in_front, to_front, strict=True))
    total = []
    for position in turned.boundary.positions:
        parts = [part[position] for part in (by_front, grads) if position in part]
        total.append(functools.reduce(jax.numpy.add, parts) if parts else jax.numpy.zeros_like(operands[position]))
    return [*values, *total]


def _inside(turned: TurnedBoundary, layout: StepLayout) -> StepLayout:
    """Returns the layout inside the loop over turns.

    In `turns` the examples of a turn lie on every worker of a group, so that a row-split layer takes its features where
    they are."""
    inside = layout.without(turned.mode.workers.axes)
    if turned.mode.kind == "modulo":
        return inside
    changed = {
        site: dataclasses.replace(exchange, enter=SPLIT) if exchange.enter == SWAP else exchange
        for site, exchange in inside.sites.exchanges.items()
    }
    return dataclasses.replace(inside, sites=dataclasses.replace(inside.sites, exchanges=changed))


def _fetches(turned: TurnedBoundary, where: MeshContext, copies: Copies) -> dict[int, MakeFetch]:
    """Makes the fetches of those crossing operands of the back, by position, that products read."""
    fetches: dict[int, MakeFetch] = {}
    for k, readers in enumerate(turned.cut.readers):
        products = []
        for index in readers:
            eqn, exchange = turned.flat.eqns[index], turned.exchanges[turned.flat.sites[index]]
            ranks = [len(v.aval.shape) for v in (eqn.invars[exchange.data], eqn.invars[exchange.weight])]
            products.append(Product(exchange, where, eqn, *ranks))
        products.sort(key=lambda product: product.exchange.enter != EXAMPLES)
        if products and (turned.mode.kind == "turns" or products[0].exchange.enter == EXAMPLES):
            fetches[turned.num_operands + k] = functools.partial(_make_fetch, turned.mode.kind, tuple(products), copies)
    return fetches


def _make_fetch(
    kind: str, products: tuple[Product, ...], copies: Copies, split: Split, layout: ExampleDim, whole_size: int
) -> OperandFetch:
    """Makes the fetch of a crossing value, in the order of arguments that `functools.partial` needs."""
    return FETCHES[kind](split, layout, whole_size, products, copies)
