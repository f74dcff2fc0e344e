"""A trace of a few steps for XProf or Perfetto, with every step and layer by name."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator

import jax

# The first steps compile and fill caches.
SKIPPED_STEPS = 3


@dataclasses.dataclass
class Profile:
    """Traces `num_steps` steps into `folder`, after the first few that this process does; None traces nothing.

    Products with weights carry their layer (`splitjax:layer:LAYER`), whatever library made it, and what crosses devices
    its scope (`splitjax:enter:LAYER`)."""

    folder: pathlib.Path | None = None
    num_steps: int = 3
    _seen: int = 0
    _active: bool = False

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Marks a step, by its number, in whatever traces."""
        if self.folder is not None and self._seen == SKIPPED_STEPS:
            jax.profiler.start_trace(str(self.folder))
            self._active = True
        self._seen += 1
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield

    def step_done(self, result: object) -> None:
        """Ends the trace when its last step is done. `result`: what the step returned; the devices may still be at
        it."""
        if self._active and self._seen >= SKIPPED_STEPS + self.num_steps:
            jax.block_until_ready(result)
            self.close()

    def close(self) -> None:
        """Ends a trace that is under way."""
        if self._active:
            jax.profiler.stop_trace()
            self._active = False
