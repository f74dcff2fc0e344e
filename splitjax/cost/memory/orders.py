"""Orders the steps of a schedule as XLA's memory schedulers do; `timeline` says what each order needs.

Steps and bytes by buffer come in, positions of steps come out, each behind those whose buffers it reads. Three
schedulers of XLA are here (`xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc`): plain post-order, depth-first by
further readers, and the list scheduler, which takes next what frees most.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence

from splitjax.cost.memory.schedule import Step


def post_order(steps: Sequence[Step], outputs: Sequence[int]) -> list[int]:
    """Returns the steps in post-order from the outputs, operands in their order."""
    writer = {b: i for i, step in enumerate(steps) for b in step.writes}
    operands = [[writer[b] for b in reversed(step.reads) if b in writer] for step in steps]
    seen, order = [False] * len(steps), []
    for root in [*(writer[b] for b in outputs if b in writer), *range(len(steps))]:
        stack = [(root, False)]
        while stack:
            i, done = stack.pop()
            if done:
                order.append(i)
            elif not seen[i]:
                seen[i] = True
                stack.append((i, True))
                stack += [(before, False) for before in operands[i] if not seen[before]]
    return order


def depth_first(steps: Sequence[Step], sizes: Mapping[int, int], outputs: Sequence[int]) -> list[int]:
    """Returns the steps in post-order from the outputs, as XLA's `DFSMemoryScheduler` does: of what a step reads, that
    first whose inputs have most further readers in all, then that of most bytes."""
    writer = {b: i for i, step in enumerate(steps) for b in step.writes}
    num_readers: dict[int, int] = {}
    for step in steps:
        for b in set(step.reads):
            num_readers[b] = num_readers.get(b, 0) + 1
    for b in outputs:
        num_readers[b] = num_readers.get(b, 0) + 1
    # Those of XLA's module: arguments have their own, and what a step writes beside others is taken out of a tuple.
    num_instructions = len(num_readers.keys() - writer.keys()) + sum(max(1, len(step.writes)) for step in steps)
    rank = [(0, 0)] * len(steps)
    total = 0
    operands: list[list[int]] = [[] for _ in steps]
    for i in post_order(steps, outputs):
        step = steps[i]
        readers = sum(num_readers.get(b, 0) for b in step.writes)
        extra, size = max(readers - 1, 0), sum(sizes[b] for b in step.writes)
        total += size
        before = list({writer[b]: None for b in step.reads if writer.get(b, i) != i})
        operands[i] = before
        extra += sum(rank[w][0] for w in before)
        size += sum(rank[w][1] for w in before)
        rank[i] = (min(extra, num_instructions), min(size, total))
    seen, order = [False] * len(steps), []
    roots = sorted({writer[b] for b in outputs if b in writer}, key=rank.__getitem__, reverse=True)
    for root in [*roots, *range(len(steps))]:
        stack = [(root, False)]
        while stack:
            i, done = stack.pop()
            if done:
                order.append(i)
                continue
            if seen[i]:
                continue
            seen[i] = True
            stack.append((i, True))
            stack.extend((w, False) for w in sorted(operands[i], key=rank.__getitem__) if not seen[w])
    return order


def waits(steps: Sequence[Step], bits: Mapping[int, int]) -> list[int]:
    """Returns by step which others it waits for, directly or through others, as bits. `steps`: none reads what a later
    one writes. `bits`: by the id of a step that matters, its bit."""
    writer = {b: i for i, step in enumerate(steps) for b in step.writes}
    own = [1 << bits[id(step)] if id(step) in bits else 0 for step in steps]
    found = [0] * len(steps)
    for i, step in enumerate(steps):
        needed = 0
        for b in step.reads:
            before = writer.get(b, i)
            if before != i:
                needed |= found[before] | own[before]
        found[i] = needed
    return found


def greedy(
    steps: Sequence[Step], sizes: Mapping[int, int], outputs: Sequence[int], free: set[int], inner: Sequence[int]
) -> list[int]:
    """Returns the steps in the order of XLA's `ListScheduler`: of those that can run, the one that frees most bytes
    less those that it writes; where several do, the one that most others read.

    **Arguments:** `free`: buffers that are counted elsewhere, such as arguments. `inner`: by step, the most bytes that
    it stores inside."""
    writer = {b: i for i, step in enumerate(steps) for b in step.writes}
    readers: dict[int, list[int]] = {}
    for i, step in enumerate(steps):
        for b in dict.fromkeys(step.reads):
            readers.setdefault(b, []).append(i)
    left = {b: len(numbers) for b, numbers in readers.items()}
    for b in outputs:
        left[b] = left.get(b, 0) + 1
    waiting = [len({writer[b] for b in step.reads if b in writer} - {i}) for i, step in enumerate(steps)]
    num_readers = [sum(len(readers.get(b, ())) for b in step.writes) for step in steps]

    def worth(i: int) -> tuple[int, int, int]:
        """What is smallest for the step to take; the last is a tie's: program order."""
        step = steps[i]
        frees = sum(sizes[b] for b in set(step.reads) if left[b] == 1 and b in writer and b not in free)
        written = sum(sizes[b] for b in step.writes if b not in free)
        takes = inner[i] or written if step.inside else written + inner[i]
        return takes - frees, -num_readers[i], i

    ready = [worth(i) for i, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    done, order = [False] * len(steps), []
    while ready:
        i = heapq.heappop(ready)[2]
        if done[i]:
            continue
        done[i] = True
        order.append(i)
        for b in dict.fromkeys(steps[i].reads):
            left[b] -= 1
            if left[b] == 1:  # the last reader now frees it
                for k in readers[b]:
                    if not done[k] and not waiting[k]:
                        heapq.heappush(ready, worth(k))
        for after in {k for b in steps[i].writes for k in readers.get(b, ())} - {i}:
            waiting[after] -= 1
            if not waiting[after]:
                heapq.heappush(ready, worth(after))
    return order


def made_late(steps: Sequence[Step], order: Sequence[int]) -> list[int]:
    """Returns an `order` with every step that reads nothing, such as one that fills arrays with zeros, right before the
    first that reads what it writes."""
    writer = {b: i for i, step in enumerate(steps) if not step.reads and not step.inside for b in step.writes}
    waiting = set(writer.values())
    late: list[int] = []
    for i in order:
        if i in waiting:
            continue
        for b in steps[i].reads:
            if writer.get(b) in waiting:
                waiting.discard(writer[b])
                late.append(writer[b])
        late.append(i)
    return [*late, *(i for i in order if i in waiting)]


def frees_soon(
    steps: Sequence[Step],
    order: Sequence[int],
    sizes: Mapping[int, int],
    outputs: Sequence[int],
    free: Collection[int],
    patience: int,
) -> list[int]:
    """Returns an `order` in which what frees at least as much as it writes runs when it could have for `patience`
    steps, and before the next loop or branch; before that all together that read a buffer last, too.

    **Arguments:** `free`: buffers that are counted elsewhere, such as arguments. The others are those of `greedy`."""
    writer = {b: i for i, step in enumerate(steps) for b in step.writes}
    reads = [dict.fromkeys(step.reads) for step in steps]
    readers: dict[int, list[int]] = {}
    for i, each in enumerate(reads):
        for b in each:
            readers.setdefault(b, []).append(i)
    left = {b: len(numbers) for b, numbers in readers.items()}
    for b in outputs:
        left[b] = left.get(b, 0) + 1
    waiting = [len({writer[b] for b in each if b in writer} - {i}) for i, each in enumerate(reads)]
    done, settled = [False] * len(steps), list[int]()
    due: dict[int, int] = {}  # by step that frees memory and can run, since when, in the order in which they became so

    def frees(i: int) -> bool:
        freed = sum(sizes[b] for b in reads[i] if left[b] == 1 and b in writer and b not in free)
        return freed > 0 and freed >= sum(sizes[b] for b in steps[i].writes if b not in free)

    def run(i: int) -> None:
        done[i] = True
        due.pop(i, None)
        settled.append(i)
        near: list[int] = []
        for b in reads[i]:
            left[b] -= 1
            if left[b] == 1:
                near += readers[b]
        for k in {k for b in steps[i].writes for k in readers.get(b, ())} - {i}:
            waiting[k] -= 1
            near.append(k)
        for k in near:
            if not done[k] and not waiting[k] and k not in due and not steps[k].inside and frees(k):
                due[k] = len(settled)

    def free_together() -> None:
        """Runs together what can run and alone has still to read some buffer, where that frees what they write."""
        for b, numbers in readers.items():
            last = [k for k in numbers if not done[k]]
            if b not in writer or not done[writer[b]] or b in free or left[b] > len(last):
                continue
            written = sum(sizes[each] for k in last for each in steps[k].writes if each not in free)
            if sizes[b] >= written and not any(waiting[k] or steps[k].inside for k in last):
                for k in last:
                    run(k)

    for i in order:
        if steps[i].inside and not done[i]:
            free_together()
        while due and not done[i]:
            first = next(iter(due))
            if not steps[i].inside and len(settled) - due[first] < patience:
                break
            run(first)
        if not done[i]:
            run(i)
    return settled
