"""Runs of the jobs of real execution under each policy, in turns, with profiles of the jobs around every run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from benchmarks.jigsaw.jobs import Model
from benchmarks.jigsaw.processes import CLUSTER, Run, started
from benchmarks.jigsaw.profiling import ALL_AT_ONCE, Known, read_profiles, read_switches, run_alone, run_mixed
from splitjax.schedule import Job, Options, Policy, simulate

GANG, MURI, ALONE, FULL, JIGSAW, ALL = (
    "gang FIFO",
    "Muri",
    "partial backpropagation alone",
    "packing alone",
    "JigSaw",
    "JigSaw, all jobs at once",
)
POLICIES: dict[str, str | Policy] = {
    GANG: "gang-fifo",
    MURI: "muri-s",
    ALONE: "spb-fifo",
    FULL: "interleave-fifo",
    JIGSAW: "jigsaw-fifo",
    ALL: ALL_AT_ONCE,
}
PARTIAL = (ALONE, JIGSAW, ALL)


@dataclasses.dataclass(frozen=True)
class Taken:
    """What was run: by round and policy the run; `around`: the profiles right before and right after it; `known`: by
    everything that was measured; `models`: what each job trains."""

    rounds: Sequence[Mapping[str, Run]]
    around: Sequence[Mapping[str, Known]]
    known: Known
    models: Mapping[str, Model]

    def jobs(self, seed: int, title: str) -> list[Job]:
        """The jobs of a round under a policy, with the profiles around its run."""
        return jobs_of(self.models, self.around[seed][title], seed, title)


def jobs_of(models: Mapping[str, Model], known: Known, seed: int, title: str) -> list[Job]:
    """The jobs of a round, in its order, with the profiles of how the policy `title` trains them."""
    order = [*models][seed % len(models) :] + [*models][: seed % len(models)]
    profile = known.partial if title in PARTIAL else known.full
    return [Job(name, 0.0, 2, models[name].num_iterations, profile[name]) for name in order]


def take(models: Mapping[str, Model], num_rounds: int) -> Taken:
    """Runs all policies in turns, with profiles of the jobs before the first run and after every one."""
    rounds: list[dict[str, Run]] = []
    places: list[dict[str, int]] = []  # by round and policy, which of the profiles came right before the run
    with started(models) as run:
        alone, mixed = [run_alone(run, models)], [run_mixed(run, models)]
        for seed in range(num_rounds):
            turn = [*POLICIES][seed % len(POLICIES) :] + [*POLICIES][: seed % len(POLICIES)]
            found, place = {}, {}
            switches = read_switches(alone, mixed)
            for title in turn:
                place[title] = len(alone) - 1
                now = read_profiles(alone[-1:], switches)
                found[title] = run(POLICIES[title], jobs_of(models, now, seed, title), seed)
                alone.append(run_alone(run, models))
                around = read_profiles(alone[-2:], switches)
                expected = simulated(jobs_of(models, around, seed, title), title)
                print(
                    f"{title}: {found[title].makespan:.1f} s, simulated {expected:.1f},"
                    f" computing {found[title].computing:.0%}",
                    flush=True,
                )
            mixed.append(run_mixed(run, models))
            rounds.append({title: found[title] for title in POLICIES})
            places.append(place)
    switches = read_switches(alone, mixed)
    around = [
        {title: read_profiles(alone[number : number + 2], switches) for title, number in place.items()}
        for place in places
    ]
    return Taken(rounds, around, read_profiles(alone, switches), models)


def simulated(jobs: Sequence[Job], title: str) -> float:
    """The makespan of `jobs` under a policy, in seconds, as the simulator has it."""
    return simulate(jobs, CLUSTER, POLICIES[title], Options(restart_seconds=0.0, exact=True)).makespan
