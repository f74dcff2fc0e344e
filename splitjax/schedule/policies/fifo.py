"""Registers the policy `gang-fifo`: first in, first out."""

from splitjax.schedule.model.policy import Assignment, View, register
from splitjax.schedule.policies.gang import gang


@register(
    "gang-fifo",
    paper="The order of Kubernetes' and YARN's queues; baseline of Gu et al., Tiresias (NSDI'19, section 5)",
)
def fifo(view: View) -> Assignment:
    """In order of arrival; what runs is not preempted, and a job that does not fit lets later ones pass that do.

    Decides for `view` by `gang`.
    """
    return gang(view, view.group_of < 0, view.arrival_seconds)
