"""Holds what a plan decides about a step's operations, by site: the `SiteLayout` that planning makes.

The plan's constraints and the products whose collectives are written out come in, in any order; a `SiteLayout` comes
out. With a mesh to run or to lower on it is a `StepLayout`, in which evaluation (`lower.products.interpret`) looks an
operation up by its site.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from splitjax.cost.convolutions import LocalConvolution
from splitjax.cost.saved import SavedInput
from splitjax.cost.transforms import LocalTransform
from splitjax.plan import Constraint, LeafPlan, Spec, SpecEntry, spec_entry
from splitjax.planning.sites.dealing import LocalDeal
from splitjax.planning.sites.exchange import Exchange, WeightUse
from splitjax.planning.sites.experts import Travel
from splitjax.planning.sites.kernels import LocalKernel
from splitjax.planning.sites.loops import LocalLoop
from splitjax.planning.sites.mesh_context import MeshContext
from splitjax.planning.sites.scatter import Scatter
from splitjax.planning.sites.spreads import Summed
from splitjax.planning.sites.turns import LocalTurns
from splitjax.primitives.walk import Site


@dataclasses.dataclass(frozen=True)
class SiteDecisions:
    """Holds what is decided about a step's operations besides the plan's constraints, in any order.

    - `explicit`: the products, biases and scales whose collectives are written out.
    - `uses`: the uses of weights inside of boundaries, in program order.
    - `names`: the layers of products, by site.
    - `convolutions`, `transforms`: convolutions and Fourier transforms that are evaluated device by device.
    - `rewrites`: sites of operations that are evaluated as others. `guarded`: sites of calls with custom rules.
    - `leaving`: sites whose results return from a split layer to the workers whose examples they are.
    - `kernels`: kernels of which each device runs its part.
    - `deals`: fused weights whose columns devices deal out among themselves.
    - `turns`: reshapes that cut the batch into turns of a loop, whose examples devices exchange.
    - `travels`: products whose tokens travel to their experts.
    - `saved`: activations that are kept in parts for the backward pass.
    """

    explicit: Sequence[Exchange | Scatter | Summed] = ()
    uses: Sequence[WeightUse] = ()
    names: Mapping[Site, str] = dataclasses.field(default_factory=dict)
    convolutions: Sequence[LocalConvolution] = ()
    transforms: Sequence[LocalTransform] = ()
    rewrites: Collection[Site] = ()
    guarded: Collection[Site] = ()
    leaving: Collection[Site] = ()
    kernels: Sequence[LocalKernel] = ()
    deals: Sequence[LocalDeal] = ()
    turns: Sequence[LocalTurns] = ()
    travels: Sequence[Travel] = ()
    saved: Sequence[SavedInput] = ()


@dataclasses.dataclass(frozen=True)
class SiteLayout:
    """Holds by site what a plan decides about a step's operations, whatever devices they run on.

    - `by_site`: the constraints.
    - `inside`: every site that has something (or a boundary) further in.
    - `exchanges`: of products with split weights, inside of boundaries.
    - `sums`: products, biases and scales whose gradients are summed into parts, inside of boundaries.
    - `uses`: the uses of weights inside of boundaries, in program order.
    - `names`: the layers of products, by which reports and profiles know them again.
    - `convolutions`: those that XLA is not asked to partition.
    - `transforms`: Fourier transforms that it is not asked to partition.
    - `rewritten`: operations that are evaluated as others of the same meaning.
    - `guarded`: calls with custom derivative rules, in which operations that XLA gets wrong run whole.
    - `leaving`: operations whose results return from a split layer to the workers whose examples they are.
    - `kernels`: kernels of which each device runs its part.
    - `deals`: fused weights whose columns devices deal out among themselves.
    - `turns`: reshapes that cut the batch into turns of a loop, whose examples devices exchange.
    - `travels`: products whose tokens travel to their experts, inside of boundaries.
    - `saved`: what rematerialised calls read that is kept in parts for the backward pass.
    - `loops`: those that workers run on their own examples, inside of boundaries.
    """

    by_site: Mapping[Site, tuple[Constraint, ...]] = dataclasses.field(default_factory=dict)
    inside: frozenset[Site] = frozenset()
    exchanges: Mapping[Site, Exchange] = dataclasses.field(default_factory=dict)
    sums: Mapping[Site, Scatter | Summed] = dataclasses.field(default_factory=dict)
    uses: tuple[WeightUse, ...] = ()
    names: Mapping[Site, str] = dataclasses.field(default_factory=dict)
    convolutions: Mapping[Site, LocalConvolution] = dataclasses.field(default_factory=dict)
    transforms: Mapping[Site, LocalTransform] = dataclasses.field(default_factory=dict)
    rewritten: frozenset[Site] = frozenset()
    guarded: frozenset[Site] = frozenset()
    leaving: frozenset[Site] = frozenset()
    kernels: Mapping[Site, LocalKernel] = dataclasses.field(default_factory=dict)
    deals: Mapping[Site, LocalDeal] = dataclasses.field(default_factory=dict)
    turns: Mapping[Site, LocalTurns] = dataclasses.field(default_factory=dict)
    travels: Mapping[Site, Travel] = dataclasses.field(default_factory=dict)
    saved: Mapping[Site, tuple[SavedInput, ...]] = dataclasses.field(default_factory=dict)
    loops: Mapping[Site, LocalLoop] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def decided(self) -> frozenset[Site]:
        """Every site at which something is decided: an equation elsewhere, if it is no call, is bound as it is."""
        products = (
            self.exchanges,
            self.sums,
            self.convolutions,
            self.transforms,
            self.kernels,
            self.deals,
            self.turns,
            self.travels,
        )
        kinds = (self.by_site, self.names, *products)
        return self.rewritten.union(self.guarded, *kinds)

    @classmethod
    def of(cls, constraints: Sequence[Constraint], decided: SiteDecisions | None = None) -> SiteLayout:
        """Makes a layout of the plan's `constraints` and of what else was `decided`, in any order."""
        decided = decided or SiteDecisions()
        by_site: dict[Site, list[Constraint]] = collections.defaultdict(list)
        for constraint in constraints:
            by_site[constraint.site].append(constraint)
        explicit, convolutions = decided.explicit, decided.convolutions
        saved: dict[Site, list[SavedInput]] = collections.defaultdict(list)
        for each in decided.saved:
            saved[each.site].append(each)
        locally = (*convolutions, *decided.transforms, *decided.kernels, *decided.deals, *decided.turns)
        own_sites = (decision.site for decision in (*explicit, *locally, *decided.travels))
        sites = {*by_site, *saved, *decided.rewrites, *decided.guarded, *own_sites}
        return cls(
            by_site={site: tuple(here) for site, here in by_site.items()},
            inside=frozenset(site[:depth] for site in sites for depth in range(1, len(site))),
            exchanges={product.site: product for product in explicit if isinstance(product, Exchange)},
            sums={product.site: product for product in explicit if not isinstance(product, Exchange)},
            uses=tuple(decided.uses),
            names=dict(decided.names),
            convolutions={convolution.site: convolution for convolution in convolutions},
            transforms={transform.site: transform for transform in decided.transforms},
            rewritten=frozenset(decided.rewrites),
            guarded=frozenset(decided.guarded),
            leaving=frozenset(decided.leaving),
            kernels={kernel.site: kernel for kernel in decided.kernels},
            deals={deal.site: deal for deal in decided.deals},
            turns={turns.site: turns for turns in decided.turns},
            travels={travel.site: travel for travel in decided.travels},
            saved={site: tuple(here) for site, here in saved.items()},
        )

    def with_first(self, constraints: Iterable[Constraint]) -> SiteLayout:
        """Returns the same layout with `constraints` before those that there are at their sites."""
        by_site = dict(self.by_site)
        for constraint in constraints:
            by_site[constraint.site] = (constraint, *by_site[constraint.site])
        return dataclasses.replace(self, by_site=by_site)

    def with_loops(self, loops: Sequence[LocalLoop]) -> SiteLayout:
        """Returns the same layout with `loops` that workers run on their own examples."""
        around = {loop.site[:depth] for loop in loops for depth in range(1, len(loop.site))}
        return dataclasses.replace(self, loops={loop.site: loop for loop in loops}, inside=self.inside | around)

    def saved_over(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Returns those of `axes`, in their order, over which something is kept in parts for the backward pass."""
        used = {axis for here in self.saved.values() for each in here for axis in each.axes}
        return tuple(axis for axis in axes if axis in used)

    def without(self, manual: Sequence[str]) -> SiteLayout:
        """Returns the same layout without the axes `manual` in its constraints."""

        def keep(entry: SpecEntry) -> SpecEntry:
            if isinstance(entry, tuple):
                return spec_entry([axis for axis in entry if axis not in manual])
            return None if entry in manual else entry

        stripped = {
            site: tuple(
                dataclasses.replace(constraint, spec=tuple(keep(entry) for entry in constraint.spec))
                for constraint in here
            )
            for site, here in self.by_site.items()
        }
        return dataclasses.replace(self, by_site=stripped)


@dataclasses.dataclass(frozen=True)
class StepLayout:
    """Holds what evaluation needs to know of a step: what its plan decides by site, and where it is evaluated.

    - `where`: the mesh, and the axes of a surrounding `shard_map`: within such, shardings refer to the
      mesh in context.
    - `sites`: what the plan decides.
    - `rematerialised`: whether this is the inside of a function that the backward pass runs again.
    """

    where: MeshContext
    sites: SiteLayout = dataclasses.field(default_factory=SiteLayout)
    rematerialised: bool = False

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """The mesh of the step."""
        return self.where.mesh

    @property
    def manual(self) -> tuple[str, ...]:
        """The axes of a surrounding `shard_map`."""
        return self.where.manual

    def without(self, manual: Sequence[str]) -> StepLayout:
        """Returns the same layout for the inside of a `shard_map` over the axes `manual`, which do not occur in its
        constraints."""
        if not manual:
            return self
        is_everywhere = set(manual) >= set(self.mesh.axis_names)
        sites = dataclasses.replace(self.sites, by_site={}) if is_everywhere else self.sites.without(manual)
        return dataclasses.replace(self, where=MeshContext(self.mesh, tuple(manual)), sites=sites)


def shardings_of(mesh: Mesh | AbstractMesh, leaves: Sequence[LeafPlan]) -> list[NamedSharding]:
    """Returns the `NamedSharding` on `mesh` of each of a plan's `leaves`."""
    return [named_sharding(mesh, leaf.spec) for leaf in leaves]


def named_sharding(mesh: Mesh | AbstractMesh, spec: Spec) -> NamedSharding:
    """Returns the `NamedSharding` of a plan's `spec` on `mesh`; an entry `?` leaves a dim to XLA."""
    return NamedSharding(
        mesh, PartitionSpec(*(PartitionSpec.UNCONSTRAINED if entry == "?" else entry for entry in spec))
    )
