"""`splitjax profile`: how sparse the gradients of a model's training step are over workers, on real data."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib

from rich.console import Console

from splitjax.cli import _session
from splitjax.cli._model_command import write_file, write_page
from splitjax.cli._options import Traceback, check_positive, parse_mesh
from splitjax.cli._train_options import DataOptions, LayoutOptions, ModelOptions, OptimizerOptions, TrainingOptions


@dataclasses.dataclass(frozen=True)
class ShowProfile(Traceback):
    """Measure density, overlap, densification and skewness of every gradient of a new model, on the first batches of its data."""

    data: DataOptions = dataclasses.field(default_factory=DataOptions)
    model: ModelOptions = dataclasses.field(default_factory=ModelOptions)
    layout: LayoutOptions = dataclasses.field(default_factory=LayoutOptions)
    num_workers: int | None = None
    """Workers among which each batch is divided, whatever there are of devices; the mesh's if not given."""
    batches: int = 2
    """How many batches to measure."""
    seed: int = 0
    """Decides the parameters and the order of the examples."""
    json: pathlib.Path | None = None
    """Write it to this file too."""
    html: pathlib.Path | None = None
    """Write it as a page to this file too."""
    plot: pathlib.Path | None = None
    """Draw it to this file too (PNG, SVG, PDF; needs matplotlib)."""

    def run(self, console: Console) -> int:
        check_positive(batch_size=self.data.batch_size, num_workers=self.num_workers, batches=self.batches)
        mesh = None if self.layout.mesh is None else parse_mesh(self.layout.mesh)
        _session.start(1 if mesh is None else mesh.num_devices, platform=self.layout.platform)
        import jax

        from splitjax.cli import _train_parts as parts

        dataset = parts.load(self.data, self.model.model, self.seed, True)
        spec, size = parts.build_model(self.model, self.data, dataset), self.data.batch_size
        parts.num_steps(TrainingOptions(), dataset, size)  # an error for a batch that the data do not fill
        options = OptimizerOptions(optimizer="sgd", schedule="constant")  # nothing is updated
        steps = parts.make_steps(
            spec, dataset, size, None if mesh is None else dict(mesh.axes), self.layout, options, parts.schedule(options, self.batches)
        )
        console.print(f"{spec.name}, {spec.num_params():,} parameters, on {dataset!r}", highlight=False, soft_wrap=True)
        state = steps.train_step.init(steps.init_fn, jax.random.key(self.seed), example=(steps.example,))
        batches = itertools.islice(dataset.train_batches(size, seed=self.seed, epoch=0), self.batches)
        profile = steps.train_step.profile(state, batches, num_workers=self.num_workers)
        # It lays out its own lines: wrapping or markup would break its tables.
        console.print(str(profile), soft_wrap=True, markup=False, highlight=False)
        if self.json is not None:
            write_file(self.json, profile.to_json(), "--json")
        if self.html is not None:
            write_page(self.html, profile._repr_html_(), "splitjax profile")
        if self.plot is not None:
            profile.plot(self.plot)
        for name, path in (("profile", self.json), ("page", self.html), ("plot", self.plot)):
            if path is not None:
                console.print(f"{name}: {path}", highlight=False)
        return 0
