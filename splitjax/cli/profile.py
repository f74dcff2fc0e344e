"""`splitjax profile`: how sparse the gradients of a model's training step are over workers, on real data; with `--job`,
what an iteration costs a worker."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import statistics
import time
from collections.abc import Iterator
from typing import Annotated, Any

from rich.console import Console

from splitjax.cli import _session
from splitjax.cli._options import CommandOptions, OptionValueError, check_positive, import_from_here, parse_mesh
from splitjax.cli._output import print_value, write_json, write_page
from splitjax.cli._train_options import (
    DataOptions,
    LayoutOptions,
    ModelOptions,
    Optimizer,
    OptimizerOptions,
    TrainingOptions,
)
from splitjax.cli._waiting import Say, waiting
from splitjax.cli.line.fields import Shown


@dataclasses.dataclass(frozen=True)
class ShowProfile(CommandOptions):
    """Measure density, overlap, densification and skewness of every gradient of a new model, on the first batches of
    its data. With --job: time, memory and gradient bytes of a worker's iteration at every depth of its backward pass,
    for `splitjax simulate --profiles`."""

    data: DataOptions = dataclasses.field(default_factory=DataOptions)
    model: ModelOptions = dataclasses.field(default_factory=ModelOptions)
    layout: LayoutOptions = dataclasses.field(default_factory=LayoutOptions)
    num_workers: int | None = None
    """Workers among which each batch is divided, whatever there are of devices; the mesh's if not given."""
    batches: int = 2
    """How many batches to measure."""
    job: bool = False
    """Measure the step as a job of the scheduler instead."""
    name: str | None = None
    """Of the job's profile; the model's if not given."""
    optimizer: Optimizer = "adamw"
    """With --job: whose state and update count."""
    microbatches: int = 1
    """With --job: accumulate the gradient over so many parts of the batch."""
    bandwidth: Annotated[str | None, Shown(metavar="RATE")] = None
    """With --job: of the link between workers, such as 10gbit, for the time of the exchange; that of the mesh is
    measured if not given, and with one device there is none."""
    latency_seconds: float = 0.0
    """With --bandwidth: of a message."""
    stages: bool = False
    """With --job: write the seconds on each resource (processor, device, link) too, whatever is scarce."""
    seed: int = 0
    """Decides the parameters and the order of the examples."""
    html: pathlib.Path | None = None
    """Write it as a page to this file too."""
    plot: pathlib.Path | None = None
    """Draw it to this file too (PNG, SVG, PDF; needs matplotlib)."""

    def run(self, console: Console) -> int:
        """Runs the command, printing on the `console`, and returns the exit status."""
        check_positive(
            batch_size=self.data.batch_size,
            num_workers=self.num_workers,
            batches=self.batches,
            microbatches=self.microbatches,
        )
        self._check_job()
        mesh = None if self.layout.mesh is None else parse_mesh(self.layout.mesh)
        _session.start(1 if mesh is None else mesh.num_devices, platform=self.layout.platform)
        import jax

        from splitjax.cli import _train_parts as parts

        import_from_here(self.model.model, self.layout.rules)
        work = parts.workload(self.model, self.data, self.seed, True)
        spec, dataset, size = work.model, work.dataset, self.data.batch_size
        parts.num_steps(TrainingOptions(), dataset, size)  # an error for a batch that the data do not fill
        # Of sparsity nothing is updated.
        options = OptimizerOptions(
            optimizer=self.optimizer if self.job else "sgd", schedule="constant", microbatches=self.microbatches
        )
        parts.check_optimizer(spec, OptimizerOptions(optimizer=self.optimizer, microbatches=self.microbatches))
        steps = parts.make_steps(
            spec,
            dataset,
            size,
            None if mesh is None else dict(mesh.axes),
            self.layout,
            options,
            parts.schedule(options, self.batches),
        )
        console.print(f"{spec.name}, {spec.num_params():,} parameters, on {dataset!r}", highlight=False, soft_wrap=True)
        with waiting(f"making the state of {spec.name}"):
            state = steps.train_step.init(steps.init_fn, jax.random.key(self.seed), example=(steps.example,))
        stream = dataset.train_batches(size, seed=self.seed, epoch=0)
        if self.job:
            return self._show_job(console, steps.train_step, state, stream, spec.name)
        with waiting("compiling the gradients of each worker") as say:
            profile = steps.train_step.profile(state, self._told(stream, say), num_workers=self.num_workers)
        print_value(profile, console)
        write_json(self.json, profile.to_json(), console, "profile")
        if self.html is not None:
            write_page(self.html, profile._repr_html_(), "splitjax profile")
        if self.plot is not None:
            profile.plot(self.plot)
        for name, path in (("page", self.html), ("plot", self.plot)):
            if path is not None:
                console.print(f"{name}: {path}", highlight=False)
        return 0

    def _told(self, stream: Iterator[Any], say: Say) -> Iterator[Any]:
        """Returns the batches to measure, each of which is announced."""
        for number, batch in enumerate(itertools.islice(stream, self.batches)):
            if number:  # with the first, compiling takes longer
                say(f"measuring batch {number + 1} of {self.batches}", number, self.batches)
            yield batch

    def _check_job(self) -> None:
        if self.latency_seconds and self.bandwidth is None:
            raise OptionValueError(
                "a latency is one of the link that --bandwidth gives",
                value=self.latency_seconds,
                place="--latency-seconds",
                remedy="give --bandwidth too",
            )
        if self.latency_seconds < 0:
            raise OptionValueError(
                "a latency is 0 or more", value=self.latency_seconds, place="--latency-seconds", remedy="give seconds"
            )
        if self.job and (self.html is not None or self.plot is not None):
            raise OptionValueError(
                "a job's profile is a table and JSON",
                place="--html" if self.html is not None else "--plot",
                remedy="use --json",
            )
        for option, given in (
            ("--name", self.name is not None),
            ("--microbatches", self.microbatches != 1),
            ("--bandwidth", self.bandwidth is not None),
            ("--optimizer", self.optimizer != "adamw"),
            ("--stages", self.stages),
        ):
            if given and not self.job:
                raise OptionValueError(
                    f"{option} belongs to a job's profile", place=option, remedy="add --job, or leave it out"
                )

    def _show_job(self, console: Console, step: Any, state: Any, stream: Iterator[Any], model: str) -> int:
        from splitjax import schedule
        from splitjax.runtime.network import parse_bandwidth
        from splitjax.schedule.model.profile_files import profiles_text
        from splitjax.sync import Link

        link = None if self.bandwidth is None else Link(self.latency_seconds, parse_bandwidth(self.bandwidth) / 8)
        batch, taken = next(stream), []  # the first also puts the examples into their order
        for _ in range(self.batches):
            begun = time.perf_counter()
            if next(stream, None) is not None:
                taken.append(time.perf_counter() - begun)
        workers = self.num_workers or step.mesh.size
        input_seconds = statistics.median(taken) / workers if taken else 0.0
        with waiting(f"compiling and timing an iteration of {model} at every depth"):
            profile = step.job_profile(
                state,
                batch,
                name=self.name or model,
                num_workers=self.num_workers,
                link=link,
                input_seconds=input_seconds,
                stages=self.stages or None,
            )
        print_value(schedule.profile_table(profile, workers), console)
        write_json(self.json, profiles_text([profile]), console, "profile")
        return 0
