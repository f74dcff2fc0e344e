"""The cells whose memory is predicted and compiled: which models, layouts, batches and targets there are.

A cell's name is its values joined by slashes, such as `vgg16/megatron/64/cpu:8`. Whether a cell is held out, and so
quoted and never fitted to, follows from its name alone. Nothing here imports splitjax.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools

# Rule set, mesh of eight devices, and whether the state is sharded besides.
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
CPU, GPU = "cpu:8", "gpu:h200:1x8"
GPU_LAYOUTS = ("data_parallel", "fsdp", "megatron")
BATCHES = (64, 256)
# TPUs by the topologies that their compiler knows, and the sizes of meshes over them.
TPU, TPU_POD, TPU_LARGE_POD = "tpu:v5p:2x2x2", "tpu:v5p:4x4x4", "tpu:v5e:16x16"
NUM_CHIPS = {TPU: 8, TPU_POD: 64, TPU_LARGE_POD: 256}
POD_LAYOUTS: dict[str, tuple[str, dict[str, dict[str, int]]]] = {
    "fsdp": ("fsdp", {TPU_POD: {"data": 64}, TPU_LARGE_POD: {"data": 256}}),
    "transformer": (
        "transformer", {TPU_POD: {"fsdp": 16, "tensor": 4}, TPU_LARGE_POD: {"fsdp": 64, "tensor": 4}}
    ),
    "experts": (
        "transformer",
        {
            TPU_POD: {"fsdp": 4, "expert": 8, "tensor": 2}, TPU_LARGE_POD: {"fsdp": 16, "expert": 8, "tensor": 2},
        },
    ),
}  # fmt: skip
# By model the examples of the smaller batch, on eight chips; the larger one has twice as many.
TPU_MODELS = {
    "vgg16_cifar": 1024, "vgg16_imagenet": 128, "resnet50": 256, "lstm": 1024, "deepfm": 16_384, "gpt2_medium": 32,
    "gpt2_xl": 64, "vit_large": 128, "unet": 128,
}  # fmt: skip
TPU_LAYOUTS = ("data_parallel", "zero", "fsdp", "megatron")
TPU_POD_MODELS = (("llama_8b", "fsdp"), ("llama_8b", "transformer"), ("mixture", "fsdp"), ("mixture", "experts"),
                  ("llama_70b", "transformer"))  # fmt: skip
HELD_OUT_OF = 3  # a cell in so many is held out


def is_held_out(name: str) -> bool:
    """Whether the cell of a name is held out, in every benchmark of predictions."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_OF == 0


@dataclasses.dataclass(frozen=True, order=True)
class Cell:
    """One combination.

    **Attributes:** `model`: of `MODELS`, of a TPU's cell of `TPU_MODELS` or `TPU_POD_MODELS`. `layout`: of `LAYOUTS`,
    of a pod's of `POD_LAYOUTS`. `batch`: examples of the global batch. `target`: what it is compiled for."""

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


def layout_of(cell: Cell) -> tuple[str, dict[str, int], bool]:
    """Rule set and mesh of a cell, and whether its state is sharded besides."""
    if cell.target in (TPU_POD, TPU_LARGE_POD):
        rules, meshes = POD_LAYOUTS[cell.layout]
        return rules, meshes[cell.target], False
    return LAYOUTS[cell.layout]


def every_cell() -> tuple[Cell, ...]:
    """All cells: on the CPU every model under every layout, the batch taking turns; on the GPU under fewer; on TPUs
    models of the sizes that people train."""
    cells = []
    for number, (model, layout) in enumerate(itertools.product(MODELS, LAYOUTS)):
        targets = (CPU, GPU) if layout in GPU_LAYOUTS else (CPU,)
        batch = BATCHES[(number + number // len(LAYOUTS)) % 2]
        cells += [Cell(model, layout, batch, target) for target in targets]
    for number, (model, layout) in enumerate(itertools.product(TPU_MODELS, TPU_LAYOUTS)):
        times = 1 + (number + number // len(TPU_LAYOUTS)) % 2
        cells.append(Cell(model, layout, times * TPU_MODELS[model], TPU))
    for model, layout in TPU_POD_MODELS:
        cells += [Cell(model, layout, NUM_CHIPS[target], target) for target in (TPU_POD, TPU_LARGE_POD)]
    return tuple(cells)
