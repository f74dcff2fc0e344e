"""`splitjax train`: a model on real data, to leave running: on any mesh, in any number of processes, through
failures."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console

from splitjax import _compat
from splitjax.cli import _session
from splitjax.cli._options import CommandOptions, check_positive, import_from_here, parse_mesh
from splitjax.cli._output import write_json
from splitjax.cli._train_options import (
    DataOptions,
    LayoutOptions,
    ModelOptions,
    OptimizerOptions,
    TrainingOptions,
    WatchOptions,
)
from splitjax.cli._waiting import waiting
from splitjax.errors import TrainingError
from splitjax.mesh import MeshShape

if TYPE_CHECKING:
    from splitjax.cli._train_parts import Steps
    from splitjax.data import Dataset, Position
    from splitjax.runtime.checkpoint import Checkpoints
    from splitjax.runtime.training.guard import NumberGuard
    from splitjax.runtime.training.ledger import Ledger
    from splitjax.runtime.training.loop import TrainingOutcome
    from splitjax.runtime.training.stopping import StopRequest

# What decides which examples a step sees: a run that changes one of these is another run.
_SAME_DATA = ("data", "batch_size", "augment", "seq_len", "vocab_size", "text_level", "seed")
LEDGER_FILE = "goodput.json"
COLUMNS = (
    "step",
    "epoch",
    "loss",
    "accuracy",
    "learning_rate",
    "eval_loss",
    "eval_accuracy",
    "eval_perplexity",
    "eval_auc",
    "seconds",
    "examples_per_second",
    "step_seconds_p50",
    "step_seconds_p99",
    "slowest_rank",
    "slowest_own_seconds",
    "setback",
    "num_devices",
    "mesh",
    "mesh_reason",
)


@dataclasses.dataclass(frozen=True)
class Train(CommandOptions):
    """Train a model on real data. The same command on a folder that holds a run's checkpoints resumes it."""

    config: pathlib.Path | None = None
    """TOML file with options as keys (batch_size = 64), which those given here override."""
    data: DataOptions = dataclasses.field(default_factory=DataOptions)
    model: ModelOptions = dataclasses.field(default_factory=ModelOptions)
    optimizer: OptimizerOptions = dataclasses.field(default_factory=OptimizerOptions)
    layout: LayoutOptions = dataclasses.field(default_factory=LayoutOptions)
    training: TrainingOptions = dataclasses.field(default_factory=TrainingOptions)
    watching: WatchOptions = dataclasses.field(default_factory=WatchOptions)

    def run(self, console: Console) -> int:
        """Runs the command, printing on the `console`, and returns the exit status."""
        begin_unix_seconds = time.time()
        check_positive(
            batch_size=self.data.batch_size,
            learning_rate=self.optimizer.learning_rate,
            epochs=self.training.epochs,
            steps=self.training.steps,
            microbatches=self.optimizer.microbatches,
            checkpoint_every=self.training.checkpoint_every,
            evaluate_every=self.training.evaluate_every,
            clip_norm=self.optimizer.clip_norm,
            spike_factor=self.training.spike_factor,
            profile_steps=self.watching.profile_steps,
        )
        from splitjax.cli import _train_parts as parts
        from splitjax.models import ModelSpec
        from splitjax.runtime.launch.initialize import initialize
        from splitjax.runtime.training.mesh_choice import run_mesh

        initialize()
        process, num_processes = _compat.place_in_run()
        sizes = run_mesh(None if self.layout.mesh is None else dict(parse_mesh(self.layout.mesh).axes))
        mesh = None if sizes is None else MeshShape.of(cast("Mapping[str, int]", sizes))  # no networks on this line
        wanted = None if mesh is None else mesh.num_devices
        _session.start(parts.devices_per_process(wanted, num_processes), platform=self.layout.platform)
        first = process == 0
        console = console if first else Console(quiet=True)

        import_from_here(self.model.model, self.layout.rules)
        work = parts.workload(self.model, self.data, self.training.seed, first)
        spec, dataset = work.model, work.dataset
        parts.check_optimizer(spec, self.optimizer)
        num_steps, an_epoch = parts.num_steps(self.training, dataset, self.data.batch_size)
        rate = parts.schedule(self.optimizer, num_steps)
        steps = parts.make_steps(
            spec,
            dataset,
            self.data.batch_size,
            None if mesh is None else dict(mesh.axes),
            self.layout,
            self.optimizer,
            rate,
        )
        console.print(
            f"{spec.name}, {spec.num_params():,} parameters, on {dataset!r}; mesh {_mesh_text(steps)}, rules"
            f" {self.layout.rules}; {num_steps} steps of {self.data.batch_size} examples",
            highlight=False,
            soft_wrap=True,
        )
        return _TrainingRun(
            self,
            console,
            dataset,
            steps,
            num_steps,
            an_epoch,
            parts.learning_rates(rate, num_steps) if isinstance(spec, ModelSpec) else None,
            first,
        ).go(begin_unix_seconds)


def _mesh_text(steps: Steps) -> str:
    mesh = steps.train_step.mesh
    return " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items())


@dataclasses.dataclass(frozen=True)
class _TrainingRun:
    """One start of a run, everything it needs being made."""

    options: Train
    console: Console
    dataset: Dataset
    steps: Steps
    num_steps: int
    steps_per_epoch: int
    learning_rates: Any
    first_process: bool

    def go(self, begin_unix_seconds: float) -> int:
        from splitjax.runtime.training.guard import NumberGuard, NumberOptions
        from splitjax.runtime.training.ledger import Ledger
        from splitjax.runtime.training.stopping import StopRequest

        folder = self.options.training.checkpoint_dir
        with contextlib.ExitStack() as stack:
            stop = stack.enter_context(StopRequest())
            checkpoints = self._checkpoints(stack)
            launched = float(os.environ.get("SPLITJAX_LAUNCH_UNIX_SECONDS", begin_unix_seconds))
            ledger = Ledger(folder / LEDGER_FILE if folder is not None and self.first_process else None, launched)
            state, position, done, seen = self._begin(checkpoints)
            if done >= self.num_steps:
                self.console.print(f"the run is complete: it has {done} of {self.num_steps} steps", highlight=False)
                return 0
            training = self.options.training
            numbers = NumberOptions(
                training.bad_numbers, training.spike_factor, training.allow_nonfinite, training.max_setbacks
            )
            guard = NumberGuard(numbers, seen)
            outcome = self._train(stack, checkpoints, (state, position, done), stop, ledger, guard)
        return self._close(outcome, stop, ledger)

    def _checkpoints(self, stack: contextlib.ExitStack) -> Checkpoints | None:
        from splitjax.runtime.checkpoint import CheckpointOptions, Checkpoints

        training = self.options.training
        if training.checkpoint_dir is None:
            return None
        return stack.enter_context(
            Checkpoints(
                CheckpointOptions(
                    directory=training.checkpoint_dir,
                    keep_last=training.keep_last,
                    keep_best=training.keep_best,
                    on_failure=lambda error: self.console.print(
                        f"warning: {error}", style="yellow", highlight=False, markup=False
                    ),
                )
            )
        )

    def _begin(self, checkpoints: Checkpoints | None) -> tuple[Any, Position, int, Any]:
        """The state to start from, where its data go on, how many steps it has seen, and what their numbers were."""
        import jax

        from splitjax.data import Position
        from splitjax.runtime.training.guard import EXTRA
        from splitjax.runtime.training.stepping import restore

        key, example = jax.random.key(self.options.training.seed), (self.steps.example,)
        if checkpoints is None or checkpoints.newest_good() is None:
            with self._waiting("planning the step and making its state, sharded"):
                return self.steps.train_step.init(self.steps.init_fn, key, example=example), Position(), 0, None
        with self._waiting("planning the step and reading its checkpoint"):
            restored = restore(checkpoints, self.steps.train_step, self.steps.init_fn, key, example=example)
        for step, reason in restored.skipped:
            self.console.print(
                f"warning: the checkpoint of step {step} is damaged and left aside: {reason}",
                style="yellow",
                markup=False,
            )
        self._check_same_run(restored.extra.get("options", {}))
        self.console.print(f"resumed from the checkpoint of step {restored.step}", highlight=False)
        return restored.state, Position.from_json(restored.extra["position"]), restored.step, restored.extra.get(EXTRA)

    def _waiting(self, text: str) -> contextlib.AbstractContextManager[Any]:
        return waiting(text) if self.first_process else contextlib.nullcontext()

    def _check_same_run(self, saved: dict[str, Any]) -> None:
        """Raises `TrainingError` where the checkpoint's data position means something else now; says what else has
        changed."""
        now = _flat(self.options)
        changed = [name for name in now if name in saved and saved[name] != now[name]]
        for name in changed:
            if name in _SAME_DATA:
                flag = f"--{name.replace('_', '-')}"
                raise TrainingError(
                    f"the checkpoints are of a run with {flag} {saved[name]}: with another one its place in the data is"
                    " lost",
                    value=now[name],
                    place=flag,
                    remedy=f"give {flag} {saved[name]}, or another --checkpoint-dir for a new run",
                )
        shown = [f"{name} {saved[name]} -> {now[name]}" for name in changed if name not in _OUTSIDE]
        if shown:
            self.console.print(f"changed since: {', '.join(shown)}", style="yellow", highlight=False, soft_wrap=True)

    def _train(
        self,
        stack: contextlib.ExitStack,
        checkpoints: Checkpoints | None,
        begin: tuple[Any, Position, int],
        stop: StopRequest,
        ledger: Ledger,
        guard: NumberGuard,
    ) -> TrainingOutcome:
        from splitjax.cli._train_parts import Evaluation
        from splitjax.data import prefetch
        from splitjax.runtime.training.loop import LoopOptions, train
        from splitjax.runtime.training.placing import batch_layout
        from splitjax.runtime.training.profiling import Profile

        data, training, watching = self.options.data, self.options.training, self.options.watching
        state, position, done = begin
        placement = batch_layout(self.steps.train_step, state, self.steps.example)
        stream = self.dataset.train_stream(
            data.batch_size, seed=training.seed, start=position, rows=placement.rows, augment=data.augment
        )
        batches = stack.enter_context(prefetch(stream, placement))
        has_test = self.steps.eval_step is not None
        evaluate = Evaluation(self.steps, self.dataset, state, data.batch_size) if has_test else None
        return train(
            self.steps.train_step,
            state,
            batches,
            LoopOptions(
                self.num_steps,
                data.batch_size,
                checkpoint_every=training.checkpoint_every or self.steps_per_epoch,
                evaluate_every=training.evaluate_every or self.steps_per_epoch,
                steps_per_epoch=self.steps_per_epoch,
            ),
            first_step=done + 1,
            checkpoints=checkpoints,
            extra={"options": _flat(self.options)},
            evaluate=evaluate,
            learning_rates=self.learning_rates,
            observers=self._observers(stack, done),
            stop=stop,
            ledger=ledger,
            profile=Profile(watching.profile, watching.profile_steps),
            guard=guard,
        )

    def _observers(self, stack: contextlib.ExitStack, done: int) -> list[Any]:
        from splitjax.runtime.training.metrics import JsonLines, Table, TensorBoard, WeightsAndBiases
        from splitjax.runtime.training.progress import TrainingProgress, memory_bytes

        if not self.first_process:
            return []
        watching = self.options.watching
        made: list[Any] = [
            TrainingProgress(
                self.console,
                self.num_steps,
                self.options.data.batch_size,
                num_done=done,
                memory=memory_bytes,
                live=Console(stderr=True),
            ).__enter__()
        ]
        stack.callback(made[0].close)
        for path, make in (
            (watching.metrics, lambda path: JsonLines(path, done)),
            (watching.csv, lambda path: Table(path, COLUMNS, done)),
            (watching.tensorboard, TensorBoard),
        ):
            if path is not None:
                made.append(make(path))
                stack.callback(made[-1].close)
        if watching.wandb is not None:
            folder = self.options.training.checkpoint_dir or pathlib.Path()
            made.append(WeightsAndBiases(watching.wandb, folder))
            stack.callback(made[-1].close)
        return made

    def _close(self, outcome: TrainingOutcome, stop: StopRequest, ledger: Ledger) -> int:
        ledger.flush()
        row, summary = outcome.row, ledger.summary()
        tested = f", test accuracy {row['eval_accuracy']:.2%}" if "eval_accuracy" in row else ""
        tested += f", test loss {row['eval_loss']:.4f}" if "eval_loss" in row else ""
        tested += f", test AUC {row['eval_auc']:.4f}" if "eval_auc" in row else ""
        tested += f", test perplexity {row['eval_perplexity']:.2f}" if "eval_perplexity" in row else ""
        self.console.print(f"step {outcome.last_step}: loss {row['loss']:.4f}{tested}", style="bold", highlight=False)
        self.console.print(str(summary), highlight=False, soft_wrap=True)
        if self.first_process:
            found = {
                "steps": outcome.last_step,
                "stopped": outcome.stopped,
                "last": {name: value for name, value in row.items() if isinstance(value, (str, int, float))},
                "goodput": {**dataclasses.asdict(summary), "goodput": summary.goodput},
            }
            write_json(self.options.json, found, self.console)
        if not outcome.stopped:
            return 0
        saved = (
            "its state is saved; the same command goes on from there"
            if self.options.training.checkpoint_dir
            else "nothing was saved"
        )
        self.console.print(
            f"stopped on request after step {outcome.last_step}; {saved}",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )
        return stop.exit_status


# Options that change nothing about the training: where things lie and what is shown.
_OUTSIDE = frozenset(
    {
        "data_dir",
        "checkpoint_dir",
        "config",
        "json",
        "metrics",
        "csv",
        "tensorboard",
        "wandb",
        "profile",
        "profile_steps",
        "platform",
        "traceback",
        "keep_last",
        "keep_best",
    }
)


def _flat(options: Train) -> dict[str, Any]:
    """Every option by its name, as JSON values."""
    values_by_name: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        group = getattr(options, field.name)
        if dataclasses.is_dataclass(group) and not isinstance(group, type):
            values = dataclasses.asdict(group)
        else:
            values = {field.name: group}
        values_by_name.update(
            {
                name: list(v) if isinstance(v, tuple) else str(v) if isinstance(v, os.PathLike) else v
                for name, v in values.items()
            }
        )
    return values_by_name
