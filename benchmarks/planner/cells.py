"""The cells whose memory is predicted and compiled: which models, layouts, batches and targets there are.

A cell's name is its values joined by slashes, such as `vgg16/megatron/64/cpu:8`. Whether a cell is held out, and so
quoted and never fitted to, follows from its name alone. Nothing here imports splitjax.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools

# Rule set, mesh, and whether the state is sharded besides.
LAYOUTS: dict[str, tuple[str, dict[str, int], bool]] = {
    "data_parallel": ("data_parallel", {"data": 8}, False),
    "zero": ("data_parallel", {"data": 8}, True),
    "fsdp": ("fsdp", {"data": 8}, False),
    "megatron": ("megatron", {"data": 2, "model": 4}, False),
    "splitbrain": ("splitbrain", {"data": 2, "model": 4}, False),
    "splitbrain_zero": ("splitbrain", {"data": 2, "model": 4}, True),
}
MODELS = (
    "mlp", "vgg16", "vgg16_bn", "resnet18", "convnext", "transformer", "llama", "scanned", "scanned_remat",
    "scanned_dots", "lstm", "deepfm", "dlrm",
)  # fmt: skip
CPU, TPU, GPU = "cpu:8", "tpu:v5e:2x4", "gpu:h200:1x8"
TARGETS = (CPU, TPU, GPU)
AHEAD_LAYOUTS = ("data_parallel", "fsdp", "megatron")  # of the targets that are compiled for ahead of time
BATCHES = (64, 256)
HELD_OUT_OF = 3  # a cell in so many is held out


def is_held_out(name: str) -> bool:
    """Whether the cell of a name is held out, in every benchmark of predictions."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_OF == 0


@dataclasses.dataclass(frozen=True, order=True)
class Cell:
    """One combination.

    **Attributes:** `model`: of `MODELS`. `layout`: of `LAYOUTS`. `batch`: examples of the global batch. `target`: of
    `TARGETS`."""

    model: str
    layout: str
    batch: int
    target: str

    @property
    def name(self) -> str:
        """Its values, joined by slashes."""
        return f"{self.model}/{self.layout}/{self.batch}/{self.target}"

    @property
    def is_held_out(self) -> bool:
        """Whether the cell is held out: by a hash of its name, so that nobody chooses."""
        return is_held_out(self.name)

    @classmethod
    def parse(cls, name: str) -> Cell:
        """The cell of a name. Raises `ValueError` for a name that is no cell's."""
        model, layout, batch, target = name.split("/")
        return cls(model, layout, int(batch), target)


def every_cell() -> tuple[Cell, ...]:
    """All cells: on the CPU every model under every layout, the batch taking turns; fewer for TPU and GPU."""
    cells = []
    for number, (model, layout) in enumerate(itertools.product(MODELS, LAYOUTS)):
        targets = TARGETS if layout in AHEAD_LAYOUTS else (CPU,)
        batch = BATCHES[(number + number // len(LAYOUTS)) % 2]
        cells += [Cell(model, layout, batch, target) for target in targets]
    return tuple(cells)
