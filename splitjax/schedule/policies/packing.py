"""Decides which jobs share which devices: what the policies with iteration-level packing have in common, as `gang` is
for whole devices.

While the jobs there ask for no more devices than there are, each has its own. When they ask for more, jobs are put
together in groups, up to `max_members` on a common set of devices, fewer than they have workers. A job's *demand* is
the device time of an iteration over the time of an iteration alone, all workers together: an eight-worker job under
partial backpropagation keeps 5.7 devices computing, so four of them fill 24 devices, or less where more jobs wait. All
groups get devices in proportion to their demand, so none is sparser than others.

A job that comes joins the sparsest group, and nobody else restarts. Where grouping all anew, jobs of equal width and
iteration time together, gains more than `least_gain` of the throughput, that is done, but not more often than each
`settle_seconds`: jobs that move restart.

A job to which devices are slow to switch shares none: it is folded onto fewer devices of its own (`folding`).
"""

from __future__ import annotations

import math

from splitjax.schedule.model.policy import Assignment, View
from splitjax.schedule.policies.group_plan import GroupPlan, PackingOptions
from splitjax.schedule.policies.orders import Order


def pack(view: View, order: Order, discipline: str, options: PackingOptions | None = None) -> Assignment:
    """Puts jobs into groups that share devices from iteration to iteration.

    **Arguments:**

    - `view`: what is known.
    - `order`: in which jobs are served. `discipline`: how the jobs of a group take turns; whichever it is, tasks may be
      on any of its devices.
    - `options`: how jobs are put into groups; None for the defaults.
    """
    options = options or PackingOptions()
    plan = GroupPlan(view, order, discipline, options)
    plan.keep()
    plan.join()
    last = plan.memory.get("packed", -math.inf)
    wake = math.inf
    if plan.waste() > options.least_gain:
        if view.now_seconds < last + options.settle_seconds - 1e-6:
            wake = last + options.settle_seconds
        else:
            plan.anew(options.least_gain)
            last = view.now_seconds  # of a look that changed nothing too: it costs as much as one that does
    changes, memory = order.after(plan.share())
    kept = {"order": memory, "packed": last, "demand": plan.demands, "folds": plan.all_folds}
    return plan.assignment(min(wake, changes), kept)
