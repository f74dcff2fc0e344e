"""`splitjax simulate`: many training jobs on one cluster, under one policy after the other."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from splitjax.cli._options import CommandOptions, OptionValueError, check_positive
from splitjax.cli._output import print_value, write_json
from splitjax.cli._waiting import waiting
from splitjax.cli.line.fields import Shown

if TYPE_CHECKING:
    from splitjax.schedule import Cluster, Job


@dataclasses.dataclass(frozen=True)
class Simulate(CommandOptions):
    """Simulate scheduling policies on a trace of training jobs (Philly or Muri tables, or jobs of one's own, plain or
    gzip): completion times, makespan, efficiency."""

    trace: pathlib.Path | None = None
    """The trace."""
    profiles: pathlib.Path | None = None
    """What iterations cost, a JSON file such as `splitjax profile --job --json` writes: Philly's jobs get its profiles
    in turn, others the one of their model."""
    cluster: str = "16x8"
    """Nodes x devices per node."""
    policy: str = "gang-srtf,gang-las"
    """Names of policies, with commas between; `--list` shows them."""
    load: float | None = None
    """Draw Poisson arrivals at this load (device time that jobs ask for, with full backpropagation, over that of the
    cluster); the trace's own if not given."""
    seed: int = 0
    """Decides arrivals and order of jobs that are drawn."""
    jobs: int | None = None
    """With `--load`: draw so many jobs, with replacement; every job of the trace once if not given."""
    tags: str | None = None
    """Take only jobs of these virtual clusters (Philly) or models (Muri), with commas between."""
    min_workers: int = 1
    """Leave out jobs with fewer workers."""
    max_workers: int | None = None
    """Leave out jobs with more workers; those that exceed the cluster are left out, and counted, either way."""
    skip_malformed: bool = False
    """Leave out rows that cannot be read instead of stopping at the first."""
    memory_gb: float | None = None
    """Memory of each device in GB (1e9 bytes); not looked at if not given."""
    node_bandwidth: Annotated[str | None, Shown(metavar="RATE")] = None
    """Of a device's link within its node, such as 300gbit: iterations wait for their exchange, as far as profiles have
    gradient bytes; not looked at if not given."""
    network_bandwidth: Annotated[str | None, Shown(metavar="RATE")] = None
    """The same between nodes, for jobs that are wider than one."""
    restart_seconds: float = 30.0
    """What a job loses whenever it gets devices."""
    interval_seconds: float = 0.0
    """Decide on multiples of this only."""
    exact: bool = False
    """Run iteration by iteration (small cases)."""
    plot: pathlib.Path | None = None
    """Draw completion times and a Gantt chart for each policy to this file too (PNG, SVG, PDF; needs matplotlib)."""
    list: bool = False
    """Show the policies and their papers, and stop."""

    def run(self, console: Console) -> int:
        """Runs the command, printing on the `console`, and returns the exit status."""
        from splitjax import schedule
        from splitjax.runtime.network import parse_bandwidth

        if self.list:
            for name in schedule.names():
                policy = schedule.get(name)
                console.print(
                    f"[bold]{name}[/bold]  {policy.summary}\n    {policy.paper}", highlight=False, soft_wrap=True
                )
            policies = {name: _described(schedule.get(name)) for name in schedule.names()}
            write_json(self.json, policies, console, "policies")
            return 0
        if self.trace is None:
            raise OptionValueError(
                "there is nothing to simulate", place="--trace", remedy="name a trace, or --list for the policies"
            )
        check_positive(
            load=self.load,
            jobs=self.jobs,
            min_workers=self.min_workers,
            max_workers=self.max_workers,
            memory_gb=self.memory_gb,
        )
        if self.jobs is not None and self.load is None:
            raise OptionValueError(
                "--jobs draws jobs, which takes a load", value=self.jobs, place="--jobs", remedy="give --load too"
            )
        rate = lambda text: 0.0 if text is None else parse_bandwidth(text) / 8
        cluster = schedule.Cluster.parse(
            self.cluster,
            memory_bytes=round(1e9 * (self.memory_gb or 0)),
            node_bytes_per_second=rate(self.node_bandwidth),
            network_bytes_per_second=rate(self.network_bandwidth),
        )
        names = _split(self.policy)
        if not names:
            raise OptionValueError(
                "no policy is named", place="--policy", remedy="name one of " + ", ".join(schedule.names())
            )
        for name in names:
            schedule.get(name)  # a mistake is told before a long trace is read
        options = schedule.Options(
            self.restart_seconds, self.interval_seconds, exact=self.exact, spans=self.plot is not None
        )
        jobs = self._jobs(self.trace, cluster, console)
        console.print(
            f"{len(jobs):,} jobs on {cluster} = {cluster.num_devices:,} devices, load"
            f" {schedule.offered_load(jobs, cluster):.2f}",
            highlight=False,
            soft_wrap=True,
        )
        with waiting("simulating") as say:
            on_start = lambda name: say(f"simulating {name}", names.index(name), len(names))
            comparison = schedule.compare(jobs, cluster, names, options, on_start=on_start)
        print_value(comparison, console)
        if self.json is not None:
            settings = {
                "trace": str(self.trace),
                "profiles": None if self.profiles is None else str(self.profiles),
                "cluster": str(cluster),
                "num_jobs": len(jobs),
                "load": schedule.offered_load(jobs, cluster),
                "seed": self.seed,
                "node_bandwidth": self.node_bandwidth,
                "network_bandwidth": self.network_bandwidth,
                "restart_seconds": self.restart_seconds,
                "interval_seconds": self.interval_seconds,
                "exact": self.exact,
            }
            settings["load"] = settings["load"] if settings["load"] < float("inf") else None
            write_json(self.json, {**settings, "policies": comparison.to_json()}, console)
        if self.plot is not None:
            from splitjax.schedule.simulation.plot import write_plot

            write_plot(self.plot, comparison.results)
            console.print(f"plot: {self.plot}", highlight=False)
        return 0

    def _jobs(self, path: pathlib.Path, cluster: Cluster, console: Console) -> tuple[Job, ...]:
        """Returns the jobs of the trace `path` that are to run on the `cluster`, and says on the `console` which are
        left out. Raises `OptionValueError` where none is left."""
        from splitjax import schedule

        profiles = None if self.profiles is None else schedule.read_profiles(self.profiles)
        trace = schedule.read_trace(path, profiles=profiles, skip_malformed=self.skip_malformed)
        if trace.skipped:
            (line, why), count = trace.skipped[0], len(trace.skipped)
            console.print(
                f"skipped {count} malformed row{'s' * (count > 1)}; the first, line {line}: {why}",
                highlight=False,
                soft_wrap=True,
                markup=False,
            )
        limit = min(cluster.num_devices, self.max_workers or cluster.num_devices)
        chosen = trace.only(
            tags=_split(self.tags or ""), min_workers=self.min_workers, max_workers=self.max_workers
        ).jobs
        jobs = tuple(job for job in chosen if job.num_workers <= limit)
        if len(jobs) < len(chosen):
            console.print(
                f"left out {len(chosen) - len(jobs)} jobs that are wider than the cluster",
                highlight=False,
                soft_wrap=True,
            )
        if not jobs:
            raise OptionValueError(
                "no job of the trace is left",
                value=str(path),
                place="--trace",
                remedy="ask for other tags or numbers of workers",
            )
        jobs = schedule.over_links(jobs, cluster)  # the load is that of iterations as they run here
        return (
            jobs
            if self.load is None
            else schedule.generate(jobs, cluster, load=self.load, seed=self.seed, num_jobs=self.jobs)
        )


def _described(policy: Any) -> dict[str, str]:
    return {"summary": policy.summary, "paper": policy.paper}


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
