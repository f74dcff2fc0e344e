"""Registers the policy `gang-srsf`: shortest remaining service first."""

from splitjax.schedule.model.policy import Assignment, View, register
from splitjax.schedule.policies.gang import gang


@register("gang-srsf", paper="Gu et al., Tiresias (NSDI'19, section 3.1): remaining time times devices; times known")
def srsf(view: View) -> Assignment:
    """The job with the least device time left first.

    Decides for `view` by `gang`.
    """
    return gang(view, view.remaining_seconds * view.num_workers)
