"""Explains the layout of a layer: why it is so, and what every other layout would cost.

A `Draft` with every decision taken and a name come in, an `Explanation` comes out. An alternative is what a rule for
the layer alone, in front of the others, would make of the step: the passes that lay leaves out are taken again, and the
leaves that lie elsewhere then are predicted as a difference (`StepPrediction.changed`). So its figures are those of the
plan that one would get.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from splitjax._plan_explained import Alternative, Explanation, StepCost
from splitjax.choosing import Prices
from splitjax.choosing.domain import Group, groups_of, read_together, rule_set
from splitjax.cost.row_tables import RowTable
from splitjax.errors import PlanError, SplitjaxError, UnavailableError
from splitjax.machines.targets import parse_target
from splitjax.mesh import MeshShape
from splitjax.plan import LayerPlan, LeafPlan, spec_text
from splitjax.planning.constraining import constrain
from splitjax.planning.draft import Draft
from splitjax.planning.layouts import lay_out, pin_rest, place_examples, share_state
from splitjax.planning.predict import StepPrediction
from splitjax.planning.table_plan import row_tables
from splitjax.roles import Role
from splitjax.rules.pins import Pin
from splitjax.rules.rule import Rule
from splitjax.rules.ruleset import RuleSet
from splitjax.rules.writing import write_rules

_PLACE = "Plan.explain"
_PASSES = (lay_out, place_examples, share_state, pin_rest, constrain)


def explain(draft: Draft, name: str, on: str | None = None, *, target: str | None = None) -> Explanation:
    """Explains the layout of a layer.

    **Arguments:**

    - `draft`: a step about which everything is decided.
    - `name`: of a layer, or the path of an array, which stands for its layer; the end of either serves where it is
      that of one alone.
    - `on`: a target such as `tpu:v5e:4x4`, of the mesh's number of devices, whose published figures the seconds are
      made of; None for those of `target`, and without one for figures that stand for the mesh's platform.
    - `target`: the machine that the step is planned for, where it was said.

    Raises `PlanError` for a name that the step lacks, `TargetError` for what is no target of this mesh, and
    `UnavailableError` for an evaluation, which has the layout of its training step."""
    if draft.request.followed is not None:
        raise UnavailableError(
            "an evaluation has the layout of its training step, and none of its own to explain",
            value=name,
            place=_PLACE,
            remedy="ask the plan of the training step",
        )
    prices, machine = machine_prices(target if on is None else on, draft.request.platform, draft.shape, _PLACE)
    layer, leaf = _find(draft, name)
    costs = _Costs(draft, StepPrediction.of(draft), prices)
    by_path = {each.path: each for each in draft.layout.leaves}
    leaves = tuple(by_path[path] for path in layer.params) if layer is not None else (leaf,) if leaf is not None else ()
    own = "" if layer is None else layer.name
    group = None if layer is None else _group(draft, layer.name)
    together = read_together(draft.graph).get(own, frozenset((own,)))
    reasons = list(_reasons(draft, leaves, layer, own))
    if others := sorted(together - {own}):
        reasons.append(f"one product reads its weight with those of {', '.join(others)}: they are to lie alike")
    return Explanation(
        name=name,
        layer=own,
        kind="" if layer is None else layer.kind,
        alike=() if group is None else tuple(each.name for each in group.layers if each.name not in together),
        leaves=leaves,
        reasons=tuple(dict.fromkeys(reasons)),
        constraints=tuple(each for each in draft.constraints if own and each.layer == own),
        collectives=tuple(each for each in costs.base.collectives if own and each.layer == own),
        machine=machine,
        planned=costs.of(costs.base),
        alternatives=() if layer is None or group is None else _alternatives(costs, layer, group, together),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Costs:
    """Prices predictions of a step. `base`: that of the plan."""

    draft: Draft
    base: StepPrediction
    prices: Prices

    def of(self, step: StepPrediction) -> StepCost:
        """Returns what a predicted step takes. Tables that go by rows send what was observed or, before that, what
        they do where every lookup finds another row."""
        dense, mesh = step.dense, self.draft.shape
        tables = _row_tables(self.draft, step)
        known = () if step.tables is None else step.tables.tables
        unobserved = {table.param for table in known if table.capacities is None}
        before = (each for table in tables if table.param in unobserved for each in table.sent)
        sent = (*step.collectives, *before)
        return StepCost(
            self.prices.local_seconds(dense, tables) + self.prices.sending_seconds(sent, mesh),
            sum(each.bytes for each in sent),
            dense.memory.state_bytes,
            dense.memory.peak_bytes,
        )


def _row_tables(draft: Draft, step: StepPrediction) -> tuple[RowTable, ...]:
    """Returns the tables that go by rows in a predicted step of the draft."""
    return (
        () if step.tables is None else row_tables(step.tables, draft.request.sync, draft.shape, draft.layout.batch_axes)
    )


def machine_prices(on: str | None, platform: str, mesh: MeshShape, place: str) -> tuple[Prices, str]:
    """Returns the figures of a machine, and words for it.

    **Arguments:** `on`: a target such as `tpu:v5e:4x4`; None for figures that stand for the `platform`. `mesh`: what
    the machine carries. `place`: who asks, for errors.

    Raises `TargetError` for what is no target of this mesh."""
    if on is None:
        known = {"tpu": "published figures of TPU v5e", "gpu": "published figures of H100"}
        return Prices.of_platform(platform), known.get(platform, f"nominal figures of a {platform}")
    return Prices.of_target(parse_target(on, f"{place}(on=)"), mesh), f"published figures of {on}"


def _find(draft: Draft, name: str) -> tuple[LayerPlan | None, LeafPlan | None]:
    """Returns the layer that a name means, or else the array."""
    layers = {each.name: each for each in draft.layout.layers}
    leaves = {each.path: each for each in draft.layout.leaves}
    known = [*layers, *leaves]
    found = [name] if name in known else [each for each in known if each.endswith(f"/{name}")]
    if len(found) != 1:
        near = found or difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
        raise PlanError(
            f"the name means {len(found)} layers or arrays" if found else "the plan has no such layer or array",
            value=name,
            place=_PLACE,
            remedy=f"name one of {', '.join(near[:6])}" if near else "see `plan.layers` and `plan.leaves`",
        )
    if found[0] in layers:
        return layers[found[0]], None
    follows = {each.path: each.follows for each in draft.graph.leaves}
    owner = follows.get(found[0]) or found[0]
    return next((each for each in layers.values() if owner in each.params), None), leaves[found[0]]


def _group(draft: Draft, layer: str) -> Group | None:
    """Returns the layers that repeat a layer, with the ways to lay them out."""
    groups = groups_of(draft.graph, draft.shape, draft.layout.replicated_batch)
    return next((group for group in groups if any(each.name == layer for each in group.layers)), None)


def _reasons(draft: Draft, leaves: Sequence[LeafPlan], layer: LayerPlan | None, own: str) -> Iterator[str]:
    """Yields why `leaves` lie as they lie."""
    for leaf in leaves:
        where = "whole on every device" if not leaf.axes else spec_text(leaf.spec)
        pin = draft.pins.by_path.get(leaf.path)
        if draft.request.pinned is not None:
            why = f"as the plan says that is pinned for the step, which has it from {leaf.rule}"
        elif pin is not None:
            why = f"{pin.reason}, which comes before every rule"
        elif leaf.rule == "default":
            why = f"no rule of {draft.layout.rules} speaks of it"
        elif leaf.role == "batch" and layer is None:
            over = ", ".join(draft.layout.batch_axes)
            why = f"it holds examples, which lie over {over}" if over else "it holds examples, and no axis splits them"
        elif leaf.rule.startswith("follows "):
            why = f"it {leaf.rule}"
        else:
            why = f"rule {leaf.rule} of {draft.layout.rules} decided it"
        yield f"{leaf.path} is {where}: {why}"
        if leaf.gradient is not None:
            yield f"{leaf.path}: its gradient and optimizer state are summed onto parts, {spec_text(leaf.gradient)}"
        if leaf.note:
            yield f"{leaf.path}: {leaf.note}"
    if layer is not None and layer.note:
        yield f"{own}: {layer.note}"
    yield from (
        f"pinned for it at operation {each.site}: {each.why}" for each in draft.constraints if each.layer == own
    )


def _alternatives(costs: _Costs, layer: LayerPlan, group: Group, together: Collection[str]) -> tuple[Alternative, ...]:
    """Returns every layout of a layer: the plan's own, then others by seconds, then those that cannot be had. Layers
    that are read `together` with it lie as it does."""
    draft = costs.draft
    alone = Group(tuple(each for each in group.layers if each.name in together), group.ways)
    found: list[Alternative] = []
    free, freed = _unpinned(draft, layer)
    for number, way in enumerate(group.ways):
        name = way.name + (f", with the pin by {' and '.join(freed)} taken out" if freed else "")
        try:
            rule = rule_set((alone,), (number,), draft.layout.replicated_batch).rules[0]
            rule = dataclasses.replace(rule, name=_new_name(draft, f"{layer.name}: {way.name}"))
            leaves = _moved(free, rule, layer)
        except SplitjaxError as error:
            found.append(Alternative(name, False, (), (), None, f"{error.message} ({error.remedy})"))
            continue
        after = {each.path: each for each in leaves}
        now = {each.path: each for each in costs.base.dense.leaves} | after
        specs = tuple((path, now[path].spec) for path in layer.params)
        step = costs.base.changed(leaves) if leaves else costs.base
        along = tuple(
            each.name for each in draft.layout.layers if each.name != layer.name and set(each.params) & set(after)
        )
        as_file = RuleSet("explained", (rule,), replicated_batch=draft.layout.replicated_batch)
        text = write_rules(as_file).partition("\n\n")[2] if leaves else ""
        found.append(Alternative(name, not leaves, specs, along, costs.of(step), rule=text))
    same: dict[object, Alternative] = {}
    for each in found:
        same.setdefault(each.name if each.cost is None else (each.specs, each.along, each.cost), each)
    kept = [each for each in same.values() if not each.is_planned]
    planned = next((each for each in same.values() if each.is_planned), None)
    if planned is None:
        by_path = {each.path: each for each in draft.layout.leaves}
        specs = tuple((path, by_path[path].spec) for path in layer.params)
        planned = Alternative(spec_text(specs[0][1]), True, specs, (), costs.of(costs.base))
    kept += _undivided(draft, layer)
    return planned, *sorted(kept, key=lambda each: math.inf if each.cost is None else each.cost.seconds)


def _unpinned(draft: Draft, layer: LayerPlan) -> tuple[Draft, tuple[str, ...]]:
    """Returns the draft without the pins of a layer's parameters, and who said them."""
    pins: Mapping[str, Pin] = {} if draft.request.pinned is not None else draft.pins.by_path
    freed = tuple(dict.fromkeys(pins[path].how for path in layer.params if path in pins))
    if not freed:
        return draft, ()
    said = tuple(each for each in draft.traced.said if each.path not in layer.params)
    return dataclasses.replace(draft, traced=dataclasses.replace(draft.traced, said=said)), freed


def _new_name(draft: Draft, name: str) -> str:
    """Returns a name for a rule that no rule of the draft's set has."""
    taken = {rule.name for rule in draft.request.rules.rules}
    while name in taken:
        name += "'"
    return name


def _moved(draft: Draft, rule: Rule, layer: LayerPlan) -> tuple[LeafPlan, ...]:
    """Returns the leaves that lie elsewhere with a `rule` in front of the others. Where a pinned plan decides, these
    are those of the layer, and what shares storage with it, alone.

    Raises what laying out the step so raises."""
    layout = draft.layout
    if draft.request.pinned is None:
        rules = dataclasses.replace(draft.request.rules, rules=(rule, *draft.request.rules.rules))
        laid = _laid_out(draft, rules, shares_state=draft.request.shard_state)
        within = {leaf.path for leaf in laid}
    else:
        batch = layout.replicated_batch
        shares_state = any(leaf.gradient is not None for leaf in layout.leaves)
        kept = dataclasses.replace(rule, shard=(), store=(), min_size=None)
        sets = [RuleSet("explained", (each,), replicated_batch=batch, allow_replicated=True) for each in (rule, kept)]
        laid, whole = (_laid_out(draft, each, shares_state) for each in sets)
        within = {a.path for a, b in zip(laid, whole, strict=True) if a.spec != b.spec or a.path in layer.params}
    # What a layout is called does not move it.
    where = lambda leaf: (leaf.spec, leaf.gradient)
    return tuple(
        new for new, old in zip(laid, layout.leaves, strict=True) if new.path in within and where(new) != where(old)
    )


def _laid_out(draft: Draft, rules: RuleSet, shares_state: bool) -> tuple[LeafPlan, ...]:
    """Returns the leaves of a step as `rules` lay them out. Raises what the passes raise."""
    request = dataclasses.replace(draft.request, rules=rules, pinned=None, shard_state=shares_state)
    fresh = Draft.of(draft.traced, draft.mesh, request, draft.chooser)
    return tuple(functools.reduce(lambda so_far, decide: decide(so_far), _PASSES, fresh).layout.leaves)


def _undivided(draft: Draft, layer: LayerPlan) -> Iterator[Alternative]:
    """Yields the dims of a layer's weight that cannot be split, as their size does not divide."""
    weight, mesh = draft.graph.leaf(layer.params[0]), draft.shape
    tensor = mesh.meant((Role.TENSOR, Role.EXPERT))
    for dim, size in zip(weight.dim_names, weight.shape, strict=False):
        if tensor and size % mesh.size(tensor) and dim in ("out", "in", "expert", "vocab", "features"):
            over = "+".join(tensor)
            why = f"{dim} {size} does not divide by {over}={mesh.size(tensor)} (see uneven='pad')"
            yield Alternative(f"{dim} split over {over}", False, (), (), None, why)
