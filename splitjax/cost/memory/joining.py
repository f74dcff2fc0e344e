"""Joins steps that XLA's compilers for GPUs and TPUs make one kernel of: steps of a schedule come in, fewer come out.

Its modules for an H200, compiled ahead of time (`tests/cost/memory/test_joining.py` has small ones), show three:

- Loops and reductions over the same elements that read the same array, or one what another writes, become a fusion with
  several results (`xla/service/gpu/transforms/multi_output_fusion.cc`): the sums of batch norm read their array once.
- A softmax becomes one kernel that reads and writes its rows once (`softmax_rewriter_triton.cc`).
- What a product's result goes through alone, such as a bias and a rectifier, is done where it is made
  (`gemm_fusion.cc`, and cuDNN's `convBiasActivationForward`).
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

# A step joins a kernel that is at most so many before it: a bound on the work, beyond what shares an array in a step.
_NEAR = 400


@dataclasses.dataclass(frozen=True)
class Domain:
    """Says what a step runs over: `elements`, and the dims that it sums over, `axes` (empty for a plain loop).

    `is_product`: it is a product or a convolution, which only what follows it can join. `is_row_max`: it begins a
    softmax, the largest of every row."""

    elements: int
    axes: tuple[int, ...] = ()
    is_product: bool = False
    is_row_max: bool = False


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Is a step as far as joining goes.

    **Attributes:**

    - `number`: of the step. `domain`: what it runs over; None for a step that joins nothing.
    - `reads`: by buffer, the bytes that it reads of it. `writes`: the buffers that it writes.
    - `is_beside`: it compares what a product makes, which is done beside whatever else follows the product.
    """

    number: int
    domain: Domain | None
    reads: Mapping[int, int]
    writes: tuple[int, ...]
    is_beside: bool = False


@dataclasses.dataclass(frozen=True)
class Joined:
    """Is what became one kernel. `numbers`: of the steps, the one that says what kind of kernel it is first. `reads`
    and `writes` as of a `Kernel`, without what nothing else reads."""

    numbers: tuple[int, ...]
    reads: Mapping[int, int]
    writes: tuple[int, ...]


def joined(kernels: Sequence[Kernel], sizes: Mapping[int, int], kept: Iterable[int]) -> list[Joined]:
    """Returns the kernels that steps in program order become.

    **Arguments:** `sizes`: bytes by buffer. `kept`: buffers that are read behind the last step."""
    readers: dict[int, set[int]] = {}
    beside = {kernel.number for kernel in kernels if kernel.is_beside}
    for kernel in kernels:
        for buffer in kernel.reads:
            readers.setdefault(buffer, set()).add(kernel.number)
    kept = set(kept)
    groups: list[list[Kernel]] = []
    place: dict[int, int] = {}  # buffer -> the group that writes it
    read_by: dict[int, list[int]] = {}  # buffer -> the groups that read it, in their order
    for kernel in kernels:
        found = _group_for(kernel, groups, place, read_by, sizes, readers, beside, kept)
        if found is None:
            found = len(groups)
            groups.append([])
        groups[found].append(kernel)
        place |= dict.fromkeys(kernel.writes, found)
        for buffer in kernel.reads:
            numbers = read_by.setdefault(buffer, [])
            place_of = bisect.bisect_left(numbers, found)
            if place_of == len(numbers) or numbers[place_of] != found:
                numbers.insert(place_of, found)
    return [_merged(group, readers, kept) for group in groups]


def _group_for(
    kernel: Kernel,
    groups: Sequence[Sequence[Kernel]],
    place: Mapping[int, int],
    read_by: Mapping[int, Sequence[int]],
    sizes: Mapping[int, int],
    readers: Mapping[int, set[int]],
    beside: set[int],
    kept: set[int],
) -> int | None:
    domain = kernel.domain
    if domain is None or domain.is_product:
        return None
    ready = max((place[buffer] for buffer in kernel.reads if buffer in place), default=-1)
    # Only what makes an array that the step reads, or reads a large one that it reads too, can be joined.
    large = [read_by.get(buffer, ()) for buffer in kernel.reads if sizes[buffer] >= domain.elements]
    earliest = max(ready, len(groups) - _NEAR, 0)
    near = {number for numbers in large for number in numbers[bisect.bisect_left(numbers, earliest) :]}
    for number in sorted(near | {ready} if ready >= earliest else near, reverse=True):
        group = groups[number]
        first = group[0].domain
        if first is None:
            continue
        made = {buffer: each for each in group for buffer in each.writes if buffer in kernel.reads}
        if first.is_product:
            others = sum(size for buffer, size in kernel.reads.items() if buffer not in made)
            alone = all(readers[buffer] - beside <= {kernel.number} and buffer not in kept for buffer in made)
            alone = alone or kernel.is_beside
            follows = [each for each in group[1:] if not each.is_beside]
            whole = sum(sizes[buffer] for buffer in made)
            if not (follows and not kernel.is_beside) and made and alone and not domain.axes and others * 8 <= whole:
                return number
            continue
        if first.elements != domain.elements:
            continue
        is_softmax = any(each.domain is not None and each.domain.is_row_max for each in group)
        if not is_softmax:
            # A loop goes on from what another makes of the same element, not from sums.
            if any(each.domain is None or each.domain.axes for each in made.values()):
                continue
            sums = {each.domain.axes for each in group if each.domain is not None and each.domain.axes}
            if domain.axes and sums - {domain.axes}:
                continue
        shared = {buffer for each in group for buffer in each.reads} & set(kernel.reads)
        if made or any(sizes[buffer] >= domain.elements for buffer in shared):
            return number
    return None


def _merged(group: Sequence[Kernel], readers: Mapping[int, set[int]], kept: set[int]) -> Joined:
    if len(group) == 1:
        (one,) = group
        return Joined((one.number,), one.reads, one.writes)
    numbers = {kernel.number for kernel in group}
    writes = [buffer for kernel in group for buffer in kernel.writes]
    reads: dict[int, int] = {}
    for kernel in group:
        for buffer, size in kernel.reads.items():
            if buffer not in writes:
                reads[buffer] = max(reads.get(buffer, 0), size)
    read_elsewhere = [buffer for buffer in writes if buffer in kept or readers.get(buffer, set()) - numbers]
    # A product says what kind of kernel it is, then a sum, then the first loop.
    is_more = lambda kernel: (
        not (kernel.domain is not None and kernel.domain.is_product),
        not (kernel.domain is not None and kernel.domain.axes),
        kernel.number,
    )
    ordered = tuple(kernel.number for kernel in sorted(group, key=is_more))
    return Joined(ordered, reads, tuple(read_elsewhere) or tuple(writes[-1:]))
