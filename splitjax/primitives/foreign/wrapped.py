"""Says what a kernel that a user keeps whole (`splitjax.kernel`) does to dims, by the notation given with it.

The notation, and which labels are whole, go in as a `KernelDims`; a `DimMap`, and the labels that may be split, come
out. The equation is `splitjax_kernel`, which `step.kernel` binds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from splitjax.errors import TraceError
from splitjax.primitives.dims import DimMap, Label, Labels, Params, Shapes, from_notation, parse_notation
from splitjax.primitives.operation import Examples, Trait
from splitjax.primitives.table import OPERATIONS, dim_rule

KERNEL: str = "splitjax_kernel"


@dataclasses.dataclass(frozen=True)
class KernelDims:
    """Says what the dims of a kernel's operands and results are.

    - `operands`, `results`: a group of the notation for each, such as "b s (h d)".
    - `whole`: labels that no device may have a part of, although results have them.
    - `adds`: whether results are summands along labels that they lack, as gradients are; otherwise such labels are
      whole.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    whole: frozenset[str] = frozenset()
    adds: bool = False

    @property
    def notation(self) -> str:
        """The notation as one text."""
        return f"{', '.join(self.operands)} -> {', '.join(self.results)}"

    def fitted(self, inputs: Shapes, outputs: Shapes) -> DimMap:
        """Returns the labels of operands and results of these shapes. Raises `TraceError` where the notation does not
        fit them."""
        return from_notation(self.notation, inputs, outputs)

    def spelt_out(self, inputs: Sequence[int], outputs: Sequence[int]) -> KernelDims:
        """Returns the dims with labels in place of `...`, for operands and results of these ranks."""

        def named(texts: Sequence[str], ranks: Sequence[int]) -> tuple[str, ...]:
            tensors = parse_notation(f"{', '.join(texts)} -> ")[0]
            missing = [
                rank - sum(dim is not Ellipsis for dim in dims) for rank, dims in zip(ranks, tensors, strict=False)
            ]
            labels = [" ".join(f"leading{k}" for k in range(count, 0, -1)) for count in missing]
            return tuple(text.replace("...", label) for text, label in zip(texts, labels, strict=False))

        return dataclasses.replace(self, operands=named(self.operands, inputs), results=named(self.results, outputs))

    def may_split(self, fitted: DimMap) -> tuple[Label, ...]:
        """Returns those labels of what `fitted` gives along which each device may have a part, in the order in which
        they stand: every result has them, or sums over them where results add up, and so does some operand."""
        standing = [label for tensor in (*fitted.inputs, *fitted.outputs) for dim in tensor for label in dim]
        return tuple(label for label in dict.fromkeys(standing) if self._splits(label, fitted))

    def _splits(self, label: Label, fitted: DimMap) -> bool:
        def places(tensors: Sequence[Labels]) -> list[list[tuple[Label, ...]]]:
            return [[dim for dim in tensor if label in dim] for tensor in tensors]

        operands, results = places(fitted.inputs), places(fitted.outputs)
        leads = all(len(dims) <= 1 and all(dim[0] == label for dim in dims) for dims in (*operands, *results))
        kept = self.adds or all(results)
        return leads and kept and any(operands) and str(label) not in self.whole and not str(label).startswith("_")


def kernel_dims(notation: str, whole: str, name: str) -> KernelDims:
    """Reads the `notation` of the kernel called `name`, and its labels that are `whole`, separated by blanks.

    Raises `TraceError` for a notation that does not parse, that has a result without an operand or an operand that is
    named twice in one dim, and for whole labels that it does not have."""
    place = f"splitjax.kernel({name})"
    if not isinstance(notation, str):
        raise TraceError("dims is a notation", value=notation, place=place, remedy='write dims="b i, i o -> b o"')
    operands, results = parse_notation(notation)
    labels = {label for tensor in (*operands, *results) for dim in tensor for label in _factors(dim)}
    missing = sorted(set(whole.split()) - labels)
    if missing:
        raise TraceError(
            f"the dims have no label {missing[0]!r}",
            value=notation,
            place=place,
            remedy=f"name labels of its dims as whole: {', '.join(sorted(labels - {'_'}))}",
        )
    for tensor in (*operands, *results):
        named = [label for dim in tensor for label in _factors(dim) if label != "_"]
        twice = next((label for label in named if named.count(label) > 1), None)
        if twice is not None:
            raise TraceError(
                f"label {twice!r} stands twice in one array",
                value=notation,
                place=place,
                remedy="give different dims of an array different labels",
            )
    left, right = notation.split("->")
    texts = [tuple(part.strip() for part in side.split(",")) for side in (left, right)]
    return KernelDims(texts[0], texts[1], frozenset(whole.split()))


def _factors(dim: object) -> tuple[str, ...]:
    if dim is Ellipsis:
        return ()
    return dim if isinstance(dim, tuple) else (str(dim),)


@dim_rule(KERNEL)
def wrapped(inputs: Shapes, outputs: Shapes, params: Params) -> DimMap:
    """Labels `inputs` and `outputs` by the notation of `params["dims"]`. Labels that are whole begin with `_`: their
    entries influence each other, so that examples in them are not taken apart."""
    dims: KernelDims = params["dims"]
    fitted = dims.fitted(inputs, outputs)
    name: Mapping[Label, Label] = {label: f"_{label}" for label in dims.whole}

    def renamed(tensors: Sequence[Labels]) -> tuple[Labels, ...]:
        return tuple(tuple(tuple(name.get(label, label) for label in dim) for dim in tensor) for tensor in tensors)

    return dataclasses.replace(
        fitted,
        inputs=renamed(fitted.inputs),
        outputs=renamed(fitted.outputs),
        sizes={name.get(label, label): size for label, size in fitted.sizes.items()},
    )


OPERATIONS.state(KERNEL, Trait.FOREIGN, examples=Examples.BY_DIMS)
