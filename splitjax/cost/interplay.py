"""Derives what two changes of a layout make of each other: the parts of a step on which their effects do not add up.

The prediction of a step and two differences from it come in; those parts come out that both changes reach, as they are
under both. Everywhere else the step has with both changes what it has with the one that reaches there, so that whoever
knows sums of both differences and these parts knows the sum over the step with both changes.
"""

from __future__ import annotations

from splitjax.cost.flow import WeightFlow
from splitjax.cost.parts import Layout, Renewed, flows_at
from splitjax.cost.prediction import Difference, Prediction, replaced


def interplay(base: Prediction, first: Difference, second: Difference) -> Renewed:
    """Returns the parts of a step on which two changes meet, under both of them; where they change one leaf, it is as
    the `second` has it.

    **Arguments:** `base`: the step without them; it has no Fourier transforms and no convolutions with groups that are
    evaluated device by device (`StepStructure.adds_up`), whose layout depends on all leaves together. `first`,
    `second`: what each of them makes otherwise alone."""
    structure, setting = base.structure, base.setting
    leaves = replaced(base.leaves, {**first.leaves, **second.leaves})
    alike = flows_at(structure, setting, first.reached & second.reached, leaves)
    bent = [i for i in alike if not _is_of_one(i, alike, base, first, second)]
    flows = replaced(base.flows, {**first.flows, **second.flows, **alike})
    touched = (first.touched & second.touched) | structure.around(bent)
    further = map(structure.position.__getitem__, structure.reweighed(bent, touched))
    reweighed = (first.reweighed & second.reweighed).union(further)
    layout = Layout(structure, setting, base.manner, leaves, flows, base.parts)
    return layout.renewed(bent, touched, reweighed, first.leaves.keys() & second.leaves.keys())


def _is_of_one(i: int, alike: dict[int, WeightFlow], base: Prediction, first: Difference, second: Difference) -> bool:
    """Tells whether a use flows under both changes as under one of them, and the other alone leaves it as it is."""
    if i not in second.flows:
        return alike[i] == first.flows.get(i, base.flows[i])
    return i not in first.flows and alike[i] == second.flows[i]
