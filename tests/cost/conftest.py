"""A small language for graphs: chains of layers whose dims carry the classes that a tracer would find."""

from __future__ import annotations

import math

import pytest

from splitjax.mesh import MeshShape
from splitjax.plan import LayerPlan, LeafPlan, spec_axes
from splitjax.trace.graph import Graph, Layer, Leaf, Use

ITEMSIZE = {"float32": 4, "bfloat16": 2, "int32": 4}


class Net:
    """Builds a graph. Dims are named: equal names are one local class; `batch` is the example dim."""

    def __init__(self, examples: int, mesh: dict[str, int]):
        self.examples, self.mesh = examples, MeshShape.of(mesh)
        self.atoms: dict[str, int] = {}
        self.sizes: list[int] = []
        self.leaves: list[Leaf] = []
        self.plans: list[LeafPlan] = []
        self.uses: list[Use] = []
        self.layers: list[Layer] = []

    def _dims(self, names, shape):
        for name, size in zip(names, shape, strict=True):
            if name not in self.atoms:
                self.atoms[name] = len(self.sizes)
                self.sizes.append(size)
        return tuple((self.atoms[name],) for name in names)

    def leaf(self, path, names, shape, spec=(), role="param", dim_names=None, follows=None, dtype="float32"):
        dims = self._dims(names, shape)
        layer = path.rpartition("/")[0]
        self.leaves.append(
            Leaf(
                len(self.leaves),
                path,
                tuple(shape),
                dtype,
                role,
                role != "batch",
                dims,
                tuple(dim_names or (None,) * len(shape)),
                layer if role == "param" else None,
                follows,
            )
        )
        held = math.prod(shape) * ITEMSIZE[dtype] // self.mesh.size(spec_axes(spec))
        self.plans.append(LeafPlan(path, tuple(shape), dtype, role, role != "batch", tuple(spec), "rule", "", held))
        return path

    def use(self, layer, param, data, out, *, trips=1, primitive="dot_general", data_dtype="float32", backward=False):
        """`data`, `out`: {dim name: size}, in order."""
        index = len(self.uses)
        ids = data_dtype == "int32"
        self.uses.append(
            Use(
                layer,
                primitive,
                (index,),
                param,
                0 if ids else 1,
                1 if ids else 0,
                tuple(data.values()),
                self._dims(data, data.values()),
                data_dtype,
                tuple(out.values()),
                self._dims(out, out.values()),
                "float32",
                0,
                trips,
                "train.py:1",
                backward,
                # The first one reads the batch; so does a recurrent one, and its state.
                reads_learned=not ids and (bool(self.uses) or trips > 1),
            )
        )

    def dense(self, name, inp, out, spec=(), bias=None, **kw):
        """`inp`, `out`: (dim name, size). The weight is (in, out)."""
        kernel = self.leaf(f"{name}/kernel", (inp[0], out[0]), (inp[1], out[1]), spec, dim_names=("in", "out"))
        params = [kernel]
        if bias is not None:
            params.append(self.leaf(f"{name}/bias", (out[0],), (out[1],), bias, dim_names=("out",)))
        self.layers.append(Layer(name, "dense", tuple(params), 0, 0, ""))
        self.use(name, kernel, {"batch": self.examples, inp[0]: inp[1]}, {"batch": self.examples, out[0]: out[1]}, **kw)

    def conv(self, name, inp, out, size):
        kernel = self.leaf(
            f"{name}/kernel", (f"{name}.h", f"{name}.w", inp[0], out[0]), (3, 3, inp[1], out[1]),
            dim_names=("height", "width", "in", "out"),
        )  # fmt: skip
        bias = self.leaf(f"{name}/bias", (out[0],), (out[1],), dim_names=("out",))
        self.layers.append(Layer(name, "conv", (kernel, bias), 0, 0, ""))
        data = {"batch": self.examples, f"{name}.rows": size, f"{name}.columns": size, inp[0]: inp[1]}
        result = {"batch": self.examples, f"{name}.rows2": size, f"{name}.columns2": size, out[0]: out[1]}
        self.use(name, kernel, data, result, primitive="conv_general_dilated")

    def graph(self, activation_bytes=0) -> Graph:
        labels = tuple(range(len(self.sizes)))
        examples = frozenset({self.atoms["batch"]} if "batch" in self.atoms else ())
        return Graph(
            tuple(self.leaves), tuple(self.layers), tuple(self.uses), (), tuple(self.sizes), labels, labels, labels,
            examples, self.examples, 1, 0, activation_bytes,
        )  # fmt: skip

    def layer_plans(self) -> tuple[LayerPlan, ...]:
        specs = {plan.path: plan.spec for plan in self.plans}
        return tuple(
            LayerPlan(x.name, x.kind, x.params, tuple(specs[p] for p in x.params), "rule") for x in self.layers
        )


@pytest.fixture
def net():
    return Net
