"""Whether a worker's state under SplitBrain is what the formula says: P_conv + P_dense / K, compiled for CPU and for
TPU.

    python -m benchmarks state                      everything (about half an hour on two busy cores), and its page
    python -m benchmarks state --quick              plans alone
    python -m benchmarks state --heads cifar --groups 8 --targets tpu

VGG-16 with a dense head of 4096, SGD with momentum, eight devices in groups of K (SplitBrain, arXiv 2112.15317).
Nothing is allocated: the step is compiled from shapes, for the TPU ahead of time (libtpu, no TPU needed:
`pip install splitjax[tpu]`).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

import splitjax
from benchmarks._common import table, virtual_devices, write_stored
from splitjax.models import ModelSpec, build, make_step
from splitjax.plan import LeafPlan, Plan

NUM_DEVICES = 8
BATCH = 64
GROUPS = (2, 4, 8)
TARGETS = ("cpu", "tpu")
TOPOLOGY = "v5e:2x4"
TOLERANCE = 1e-3
HEADS = {"cifar": {}, "imagenet": {"image_size": 224, "num_classes": 1000}}
HEAD_TEXT = {"cifar": "512-4096-4096-10", "imagenet": "25088-4096-4096-1000"}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Bytes of the state's arrays on one device, read off an executable."""

    state_bytes: int  # as it counts them: all arguments less the batch
    padding_bytes: int  # of these, what fills up tiles
    explained: bool  # the arrays and their padding add up to the executable's count of argument bytes


@dataclasses.dataclass(frozen=True)
class Measured:
    """One head in groups of one size."""

    head: str
    group: int
    num_conv: int  # parameters
    num_dense: int
    formula_bytes: float
    plan_bytes: int
    exceptions: tuple[tuple[str, float], ...]  # (leaf, bytes beyond its share in the formula)
    compiled: dict[str, Compiled]

    @property
    def ok(self) -> bool:
        counts = [self.plan_bytes, *(one.state_bytes - one.padding_bytes for one in self.compiled.values())]
        explained = all(one.explained for one in self.compiled.values())
        return explained and all(abs(count / self.formula_bytes - 1) <= TOLERANCE for count in counts)


def main(argv: list[str] | None = None) -> int:
    """Measures the chosen states; returns 1 where one misses the formula."""
    virtual_devices(NUM_DEVICES)
    parser = argparse.ArgumentParser("state", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="plans alone")
    parser.add_argument("--heads", nargs="*", choices=tuple(HEADS), default=[])
    parser.add_argument("--groups", nargs="*", type=int, choices=GROUPS, default=[])
    parser.add_argument("--targets", nargs="*", choices=TARGETS, default=[])
    parser.add_argument(
        "--output", type=pathlib.Path, help="folder of the page; a whole run writes to benchmarks/results"
    )
    options = parser.parse_args(argv)
    targets = () if options.quick else options.targets or TARGETS
    if "tpu" in targets and importlib.util.find_spec("libtpu") is None:
        print("no libtpu here (pip install 'splitjax[tpu]'): compiling for the CPU alone")
        targets = tuple(target for target in targets if target != "tpu")
    found = []
    for head in options.heads or HEADS:
        for group in options.groups or GROUPS:
            found.append(measure(head, build("vgg16", **HEADS[head]), group, targets))
            print(_line(found[-1]), flush=True)
    whole = targets == TARGETS and not options.heads and not options.groups
    if whole or options.output:
        from benchmarks import machine

        header = machine.header(
            machine.this_machine((*machine.PACKAGES, "libtpu")), "python -m benchmarks state"
        ).rstrip()
        stored = {"header": header, "states": [dataclasses.asdict(one) for one in found]}
        print("wrote", write_stored("state", stored, page_lines, options.output))
    return 0 if all(one.ok for one in found) else 1


def measure(head: str, spec: ModelSpec, group: int, targets: tuple[str, ...] = ()) -> Measured:
    """The state of `spec` in groups of `group` workers: by formula, by plan, and as compiled for `targets`."""
    shape = {"data": NUM_DEVICES // group, "model": group}
    step, state, batch = _planned(spec, shape)
    plan = step.plan(state, batch)
    num_conv, num_dense = count_params(state["params"])
    compiled = {}
    for target in targets:
        if target == "tpu":
            step, state, batch = _planned(spec, tpu_mesh(shape))
        compiled[target] = _read(step.lower(state, batch).compile(), state, batch)
    return Measured(
        head,
        group,
        num_conv,
        num_dense,
        formula_bytes(num_conv, num_dense, group),
        plan.memory.state_bytes,
        exceptions(plan, group),
        compiled,
    )


def formula_bytes(num_conv: int, num_dense: int, group: int) -> float:
    """SplitBrain's state of a worker, for float32 parameters with one momentum each."""
    return 2 * 4 * (num_conv + num_dense / group)


def count_params(params: Any) -> tuple[int, int]:
    """The numbers of parameters in convolutions and in dense layers."""
    conv = dense = 0
    for name, layer in params.items():
        count = sum(leaf.size for leaf in jax.tree.leaves(layer))
        conv, dense = (conv + count, dense) if name.startswith("conv") else (conv, dense + count)
    return conv, dense


def exceptions(plan: Plan, group: int) -> tuple[tuple[str, float], ...]:
    """The state's arrays that take another share than the formula's, with how much more."""
    found = []
    for leaf in plan.leaves:
        if leaf.is_state:
            beyond = leaf.bytes_per_device - _share(leaf, plan, group)
            if beyond:
                found.append((leaf.path, beyond))
    return tuple(found)


def tpu_mesh(shape: dict[str, int], name: str = TOPOLOGY) -> jax.sharding.Mesh:
    """A mesh of TPUs that need not exist: enough to compile for."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
    devices = np.array(topology.devices).reshape(tuple(shape.values()))
    return jax.sharding.Mesh(devices, tuple(shape), axis_types=(jax.sharding.AxisType.Auto,) * len(shape))


def _share(leaf: LeafPlan, plan: Plan, group: int) -> float:
    """What the formula counts for an array: all of a convolution, a part of a dense layer, nothing of a step
    counter."""
    if leaf.role not in ("param", "optimizer"):
        return 0.0
    whole = leaf.whole_bytes(plan.mesh)
    return whole if "/conv" in leaf.path else whole / group


def _planned(spec: ModelSpec, mesh: Any) -> tuple[Any, Any, Any]:
    """The step, and its state and batch as shapes."""
    init, step, _ = make_step(spec, optax.sgd(0.1, momentum=0.9), value_and_grad=splitjax.value_and_grad)
    step = splitjax.parallelize(step, mesh=mesh, rules="splitbrain")
    batch = spec.example(BATCH)
    return step, step.abstract_state(init, jax.random.key(0), example=(batch,)), batch


def _read(compiled: Any, state: Any, batch: Any) -> Compiled:
    """Takes an executable's argument bytes apart: arrays as it shards them, and the filling of the tiles it stores them
    in."""
    formats = [jax.tree.leaves(one) for one in compiled.input_formats[0]]
    sizes = [
        [_bytes(leaf, form) for leaf, form in zip(jax.tree.leaves(argument), forms, strict=True)]
        for argument, forms in zip((state, batch), formats, strict=True)
    ]
    bare, stored = (sum(pair[which] for pair in sizes[0]) for which in (0, 1))
    batch_stored = sum(pair[1] for pair in sizes[1])
    counted = compiled.memory_analysis().argument_size_in_bytes
    return Compiled(counted - batch_stored, stored - bare, counted == stored + batch_stored)


def _bytes(leaf: Any, form: Any) -> tuple[int, int]:
    """Bytes of one device's part of an array: its values', and with its dims filled up to whole tiles."""
    shape = form.sharding.shard_shape(leaf.shape)
    bare = math.prod(shape) * leaf.dtype.itemsize
    tiling = getattr(form.layout, "tiling", None)
    if not tiling:
        return bare, bare
    dims = [shape[dim] for dim in form.layout.major_to_minor]
    tile = tiling[0]
    dims = [1] * (len(tile) - len(dims)) + dims
    for position, size in enumerate(tile, start=len(dims) - len(tile)):
        dims[position] = -(-dims[position] // size) * size
    return bare, math.prod(dims) * leaf.dtype.itemsize


def _line(one: Measured) -> str:
    parts = [f"plan {_off(one.plan_bytes, one)}"]
    for target, compiled in one.compiled.items():
        parts.append(f"{target} {_off(compiled.state_bytes - compiled.padding_bytes, one)}"
                     + (f" (with tiles' padding {_off(compiled.state_bytes, one)})" if compiled.padding_bytes else "")
                     + ("" if compiled.explained else " UNEXPLAINED"))  # fmt: skip
    return (
        f"{'pass' if one.ok else 'MISS'} {one.head} K={one.group}: formula {_mib(one.formula_bytes)} MiB; "
        + ", ".join(parts)
    )


def _off(count: float, one: Measured) -> str:
    return f"{100 * (count / one.formula_bytes - 1):+.4f} %"


def _mib(count: float) -> str:
    return f"{count / 2**20:.3f}"


def _stored(fields: dict[str, Any]) -> Measured:
    """Makes of what was stored of a state what was measured."""
    compiled = {target: Compiled(**one) for target, one in fields["compiled"].items()}
    exceptions = tuple((path, beyond) for path, beyond in fields["exceptions"])
    return Measured(**{**fields, "compiled": compiled, "exceptions": exceptions})


def page_lines(stored: Mapping[str, Any]) -> list[str]:
    """Returns the page of what `state.json` holds."""
    found = list(map(_stored, stored["states"]))
    targets = list(dict.fromkeys(target for one in found for target in one.compiled))
    titles = ["head", "K", "P_conv", "P_dense", "formula, MiB", "plan"]
    for target in targets:
        titles += [f"compiled for {target}"] + (["with tiles' padding"] if target == "tpu" else [])
    rows = []
    for one in found:
        row = [HEAD_TEXT[one.head], str(one.group), f"{one.num_conv:,}", f"{one.num_dense:,}", _mib(one.formula_bytes)]
        row.append(_off(one.plan_bytes, one))
        for target in targets:
            compiled = one.compiled[target]
            row.append(
                _off(compiled.state_bytes - compiled.padding_bytes, one)
                + ("" if compiled.explained else " (unexplained)")
            )
            if target == "tpu":
                row.append(f"{_off(compiled.state_bytes, one)} ({compiled.padding_bytes:,} bytes)")
        rows.append(row)
    passed = sum(one.ok for one in found)
    lines = [
        "# State: SplitBrain's formula",
        "",
        f"**{passed} of {len(found)} within {100 * TOLERANCE:g} % of P_conv + P_dense / K.**",
        "",
        stored["header"],
        "",
        (
            'VGG-16 under `rules="splitbrain"`, SGD with momentum, float32, on eight devices (data = 8 / K, model ='
            f" K), {BATCH} images; compiled from shapes for virtual CPU devices and, ahead of time, for a TPU"
            f" {TOPOLOGY}. Formula: parameters and momentum, so 8 bytes times P_conv + P_dense / K. The other columns"
            " are how far a worker's state is from it: as planned, and as compiled (`argument_size_in_bytes` less the"
            " batch)."
        ),
        "",
        *table(titles, rows),
        "",
        (
            "A TPU stores arrays in tiles (8 x 128 for most), and fills up what is narrower: the 64-channel"
            " convolutions, which the formula counts whole, and biases. That is the compiler's, whoever shards; the"
            " column beside it is the same count without the filling. For every row, arrays as the executable shards"
            " them plus their filling are its count of argument bytes, to the byte."
        ),
        "",
        "Not at their share in the formula (bytes more on each device):",
        "",
    ]
    for one in found:
        text = ", ".join(f"`{path}` {beyond:+.0f}" for path, beyond in one.exceptions) or "none"
        lines.append(f"- {HEAD_TEXT[one.head]}, K = {one.group}: {text}")
    lines += [
        "",
        (
            "A bias of 10 classes does not split over K and its layer is split by rows, so every worker has it whole;"
            " the step counter belongs to no layer."
        ),
    ]
    return lines


if __name__ == "__main__":
    sys.exit(main())
