"""Says how long a search may go on, and tells whoever watches it what it has.

A limit of work is the same on every machine; a limit of time is a guard beside it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

from splitjax.errors import SearchError
from splitjax.search.network import Ints

DEFAULT_WORK = 2_000_000_000
# Of work and time, what prices may take before local search has the rest.
PRICING_SHARE = 0.4


@dataclasses.dataclass(frozen=True)
class Effort:
    """Holds what a search may spend.

    **Attributes:**

    - `max_work`: table entries to look at, about 2 * 10**8 a second on one core. What is decided within it is the same
      in every run.
    - `seconds`: a guard; None: none. `now`: the clock that it is read from, such as `time.process_time`.
    - `seed`: of the draws of the local search.
    - `pricing_share`: of work and time, what prices, and with them the bound, may take before local search has the
      rest.

    Raises `SearchError` for limits that leave no work or no time.
    """

    max_work: int = DEFAULT_WORK
    seconds: float | None = None
    seed: int = 0
    now: Callable[[], float] = time.monotonic
    pricing_share: float = PRICING_SHARE

    def __post_init__(self) -> None:
        if self.max_work <= 0 or (self.seconds is not None and not self.seconds > 0):
            raise SearchError(
                "a search needs some work and time",
                value=(self.max_work, self.seconds),
                place="max_work, seconds",
                remedy="give numbers above 0",
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Progress:
    """Holds what a search has so far.

    **Attributes:** `cost`: of the best assignment that fits; infinity: none yet. `bound`: what is proven. `assignment`:
    returns that assignment, int[variables of the problem], when it is called; None where there is none.
    """

    cost: float
    bound: float
    assignment: Callable[[], Ints | None]


Watch = Callable[[Progress], None]


class Clock:
    """Adds up what a search spends, and says when to stop.

    **Arguments:** `effort`: the limits; time runs from here.
    """

    def __init__(self, effort: Effort):
        self._effort = effort
        self.begin: float = effort.now()
        self.work = 0
        self.struck = False

    def spend(self, work: int, share: float = 1.0) -> bool:
        """Adds work that was done; tells whether less than `share` of the work and of the time is used up. Where the
        time is, even a share of it, what comes out hangs on the clock from then on, and `struck` says so."""
        self.work += work
        seconds = self._effort.seconds
        if seconds is not None and self._effort.now() - self.begin > share * seconds:
            self.struck = True
            return False
        return self.work < share * self._effort.max_work

    @property
    def left_seconds(self) -> float:
        """What the clock leaves; infinity without a limit of time."""
        seconds = self._effort.seconds
        return math.inf if seconds is None else max(0.0, self.begin + seconds - self._effort.now())
