"""Joins steps that XLA's compilers for GPUs and TPUs make one kernel of: steps of a schedule come in, fewer come out.

Its modules for an H200, compiled ahead of time (`tests/cost/memory/test_joining.py` has small ones), show three:

- Loops and reductions over the same elements that read the same array, or one what another writes, become a fusion with
  several results (`xla/service/gpu/transforms/multi_output_fusion.cc`): the sums of batch norm read their array once.
- A softmax becomes one kernel that reads and writes its rows once (`softmax_rewriter_triton.cc`).
- What a product's result goes through alone, such as a bias and a rectifier, is done where it is made
  (`gemm_fusion.cc`, and cuDNN's `convBiasActivationForward`).

A TPU's compiler goes further with the last: such a loop is done where the product is made whatever else it reads, and
the product waits for that. So `fusion.3` in the module of `unet/zero/256` adds the gradient of a group norm to that of
a convolution.
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


def joined(
    kernels: Sequence[Kernel], sizes: Mapping[int, int], kept: Iterable[int], ends_products: bool = False
) -> list[Joined]:
    """Returns the kernels that steps in program order become.

    **Arguments:** `sizes`: bytes by buffer. `kept`: buffers that are read behind the last step. `ends_products`: what
    alone reads a product is done where that is made, whatever else it reads: the product waits for it."""
    groups = _Groups(kernels, sizes, set(kept), ends_products)
    for kernel in kernels:
        groups.add(kernel)
    return [_merged(group, groups.readers, groups.kept) for group in groups.groups if group]


class _Groups:
    """Holds the kernels so far, each as the steps that it does.

    **Attributes:** `groups`: the kernels, in program order; a product that waits leaves an empty one. `readers`: by
    buffer, the numbers of the steps that read it. `kept`: buffers that are read behind the last step."""

    def __init__(
        self, kernels: Sequence[Kernel], sizes: Mapping[int, int], kept: set[int], ends_products: bool
    ) -> None:
        self.groups: list[list[Kernel]] = []
        self.kept: set[int] = kept
        self.readers: dict[int, set[int]] = {}
        for kernel in kernels:
            for buffer in kernel.reads:
                self.readers.setdefault(buffer, set()).add(kernel.number)
        self._sizes, self._ends_products = sizes, ends_products
        self._beside = {kernel.number for kernel in kernels if kernel.is_beside}
        self._place: dict[int, int] = {}  # buffer -> the group that writes it
        self._read_by: dict[int, list[int]] = {}  # buffer -> the groups that read it, in their order

    def add(self, kernel: Kernel) -> None:
        """Adds a step to the kernel that it joins, or as one of its own."""
        found = self._group_for(kernel)
        if found is None:
            product = self._ended_by(kernel) if self._ends_products else None
            found = len(self.groups)
            self.groups.append([])
            if product is not None:
                waiting, self.groups[product] = self.groups[product], []
                for each in waiting:
                    self._put(each, found)
        self._put(kernel, found)

    def _ended_by(self, kernel: Kernel) -> int | None:
        """Returns the last product that a loop over elements alone reads, as the number of its group."""
        if kernel.domain is None or kernel.domain.is_product or kernel.is_beside:
            return None
        for number in sorted({self._place[buffer] for buffer in kernel.reads if buffer in self._place}, reverse=True):
            group = self.groups[number]
            if len(group) != 1 or group[0].domain is None or not group[0].domain.is_product:
                continue
            writes = group[0].writes
            if all(self.readers.get(each) == {kernel.number} and each not in self.kept for each in writes):
                if any(self._sizes[each] >= kernel.domain.elements for each in writes):
                    return number
        return None

    def _put(self, kernel: Kernel, found: int) -> None:
        """Makes a step one of a kernel."""
        self.groups[found].append(kernel)
        self._place |= dict.fromkeys(kernel.writes, found)
        for buffer in kernel.reads:
            numbers = self._read_by.setdefault(buffer, [])
            position = bisect.bisect_left(numbers, found)
            if position == len(numbers) or numbers[position] != found:
                numbers.insert(position, found)

    def _near(self, kernel: Kernel, domain: Domain) -> list[int]:
        """Returns the groups that a step may join, the last first: what makes an array that it reads, or reads a large
        one that it reads too."""
        ready = max((self._place[buffer] for buffer in kernel.reads if buffer in self._place), default=-1)
        earliest = max(ready, len(self.groups) - _NEAR, 0)
        large = [self._read_by.get(buffer, ()) for buffer in kernel.reads if self._sizes[buffer] >= domain.elements]
        near = {number for numbers in large for number in numbers[bisect.bisect_left(numbers, earliest) :]}
        return sorted(near | {ready} if ready >= earliest else near, reverse=True)

    def _group_for(self, kernel: Kernel) -> int | None:
        domain = kernel.domain
        if domain is None or domain.is_product:
            return None
        for number in self._near(kernel, domain):
            group = self.groups[number]
            first = group[0].domain if group else None
            if first is None:
                continue
            made = {buffer: each for each in group for buffer in each.writes if buffer in kernel.reads}
            if first.is_product:
                if self._follows(kernel, domain, group, made):
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
            if made or any(self._sizes[buffer] >= domain.elements for buffer in shared):
                return number
        return None

    def _follows(self, kernel: Kernel, domain: Domain, group: Sequence[Kernel], made: Mapping[int, Kernel]) -> bool:
        """Whether a product computes a loop over elements, too, that reads what the product's `group` has `made`:
        nothing else reads it, but for what is compared beside, and the loop reads little besides."""
        if not made or domain.axes:
            return False
        others = sum(size for buffer, size in kernel.reads.items() if buffer not in made)
        if others * 8 > sum(self._sizes[buffer] for buffer in made):
            return False
        if kernel.is_beside:
            return True
        if any(not each.is_beside for each in group[1:]):
            return False
        return all(
            self.readers[buffer] - self._beside <= {kernel.number} and buffer not in self.kept for buffer in made
        )


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
