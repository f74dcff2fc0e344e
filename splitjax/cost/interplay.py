"""Derives what two changes of a layout make of each other: the parts of a step on which their effects do not add up.

The prediction of a step and two differences from it come in; those parts come out that both changes reach, as they are
under both. Everywhere else the step has with both changes what it has with the one that reaches there, so that whoever
knows sums of both differences and these parts knows the sum over the step with both changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping

from splitjax.cost.flow import WeightFlow
from splitjax.cost.parts import Layout, Renewed, flows_at
from splitjax.cost.prediction import Difference, Prediction, replaced

_NOTHING = Renewed({}, {}, {}, {}, {}, {})


@dataclasses.dataclass(frozen=True, eq=False)
class Meeting:
    """Is what becomes of the uses on which two changes of a step meet: the same for all that have their `ways`.

    **Attributes:** `base`: the step without them. `flows`: of all uses, under both. `at_uses`: the parts of uses that
    both reach. `reweighed`: the leaves whose collectives depend on these uses.
    """

    base: Prediction
    flows: tuple[WeightFlow, ...]
    at_uses: Renewed
    reweighed: frozenset[int]

    @classmethod
    def of(cls, base: Prediction, first: Difference, second: Difference) -> Meeting:
        """Returns where two changes of a step meet.

        **Arguments:** `base`: the step without them; it has no Fourier transforms and no convolutions with groups that
        are evaluated device by device (`StepStructure.adds_up`), whose layout depends on all leaves together. `first`,
        `second`: what each of them makes otherwise alone. Where both change one leaf, it is as the `second` has it."""
        structure, setting = base.structure, base.setting
        leaves = replaced(base.leaves, {**first.leaves, **second.leaves})
        alike = flows_at(structure, setting, first.reached & second.reached, leaves)
        bent = [i for i in alike if not _is_of_one(i, alike, base, first, second)]
        flows = replaced(base.flows, {**first.flows, **second.flows, **alike})
        touched = (first.touched & second.touched) | structure.around(bent)
        layout = Layout(structure, setting, base.manner, leaves, flows, base.parts)
        further = frozenset(map(structure.position.__getitem__, structure.reweighed(bent, touched)))
        return cls(base, flows, layout.renewed(bent, touched, (), ()), further)

    def at_leaves(self, first: Difference, second: Difference) -> Renewed:
        """Returns the parts of the leaves that two changes reach, of which this is the meeting."""
        base, met = self.base, (first.reweighed & second.reweighed) | self.reweighed
        resized = first.leaves.keys() & second.leaves.keys()
        if not met and not resized:
            return _NOTHING
        leaves = replaced(base.leaves, {**first.leaves, **second.leaves})
        layout = Layout(base.structure, base.setting, base.manner, leaves, self.flows, base.parts)
        # Most depend on no more than under one of both.
        sides = [(each.renewed.weights, each.renewed.sent_by_leaf) for each in (first, second)]
        known = {
            i: (weight, sent.get(i, base.sent_by_leaf[i]))
            for i in met
            for weights, sent in sides
            if layout.weighs_as(i, weight := weights.get(i, base.weights[i]))
        }
        found = layout.renewed((), (), met - known.keys(), resized)
        return dataclasses.replace(
            found,
            weights={**found.weights, **{i: weight for i, (weight, _) in known.items()}},
            sent_by_leaf={**found.sent_by_leaf, **{i: sent for i, (_, sent) in known.items()}},
        )


def ways(base: Prediction, change: Difference) -> Hashable:
    """Returns what decides, together with the `base`, how weights are split in use under a `change`, alone or together
    with others. Two changes for which the results are equal reach the same uses and split them alike; they may store
    the weights otherwise."""
    structure, changed = base.structure, {base.leaves[i].path: leaf for i, leaf in change.leaves.items()}
    split = tuple(
        (i, base.flows[i].use.param in changed, change.flows.get(i, base.flows[i]).by_layout)
        for i in sorted(change.reached)
    )
    return split, tuple((path, leaf.spec) for path, leaf in changed.items() if path in structure.fed_from)


def _is_of_one(
    i: int, alike: Mapping[int, WeightFlow], base: Prediction, first: Difference, second: Difference
) -> bool:
    """Tells whether a use flows under both changes as under one of them, and the other alone leaves it as it is."""
    if i not in second.flows:
        return alike[i] == first.flows.get(i, base.flows[i])
    return i not in first.flows and alike[i] == second.flows[i]
