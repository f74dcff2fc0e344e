"""Registers the policy `gang-srtf`: shortest remaining time first."""

from splitjax.schedule.model.policy import Assignment, View, register
from splitjax.schedule.policies.gang import gang


@register(
    "gang-srtf",
    paper=(
        "Grandl et al., Multi-resource Packing for Cluster Schedulers (SIGCOMM'14, section 3.3); preemptive, times"
        " known"
    ),
)
def srtf(view: View) -> Assignment:
    """The job with the least time left first.

    Decides for `view` by `gang`.
    """
    return gang(view, view.remaining_seconds)
