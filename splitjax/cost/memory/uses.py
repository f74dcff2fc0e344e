"""Tells who makes and who reads the values of a split `Program`, through views, and what that says of how they are
stored on a TPU: rounded to two bytes an element, as the bits of a comparison, repeated, as the end of what a product's
result goes through, or over another."""

from __future__ import annotations

import functools
import math
from collections.abc import Set

import jax.numpy as jnp
from jax import lax

from splitjax.cost.memory.program import Kind, Node, Program, Region, views_of

# They move elements, which no product does with its result.
_ENDING_CHAINS = frozenset("slice_of_split concatenate".split())
# So often, at most, a loop repeats elements between dims that are stored repeated: 4 times in what was looked at.
_FEW_TIMES = 16
_COMPARES = frozenset("eq ne lt le gt ge".split())


class Uses:
    """Holds the nodes of a program by what they make and read. **Attributes:** `makers`: by value, the node that makes
    it."""

    def __init__(self, program: Program) -> None:
        self.makers: dict[int, Node] = {}
        self._program = program
        self._users: dict[int, list[Node]] = {}
        self._collect(program.body)

    def _collect(self, region: Region) -> None:
        for node in region.nodes:
            for inner in node.regions:
                self._collect(inner)
                for value in inner.outputs:
                    self._users.setdefault(value, []).append(node)
            self.makers.update(dict.fromkeys(node.outputs, node))
            for value in set(node.inputs):
                self._users.setdefault(value, []).append(node)

    def readers_of(self, value: int) -> list[Node] | None:
        """Returns the readers of a value through views, a loop or branch that hands it on among them; None where it is
        a result of the step, or nothing reads it."""
        readers: list[Node] = []
        for user in self._users.get(value, ()):
            if user.kind is Kind.VIEW:
                for view in views_of(user, value):
                    inner = self.readers_of(view)
                    if inner is None:
                        return None
                    readers += inner
            else:
                readers.append(user)
        return readers if value in self._users else None

    def is_stack(self, value: int) -> bool:
        """Whether a value holds what each round of a loop writes."""
        maker = self.makers.get(value)
        return maker is not None and maker.name == "scan" and value in maker.outputs[maker.num_carry :]

    def maker_behind(self, value: int) -> Node | None:
        """Returns the node that makes what a value looks at through views."""
        maker = self.makers.get(value)
        while maker is not None and maker.kind is Kind.VIEW and maker.inputs:
            is_own = len(maker.inputs) == len(maker.outputs)
            value = maker.inputs[maker.outputs.index(value)] if is_own else maker.inputs[0]
            maker = self.makers.get(value)
        return maker

    def itemsize(self, value: int) -> int:
        """Returns the bytes in which an element is stored where products round what they read: two of four where they
        alone read it, and reductions, which are computed in the loop that makes it."""
        itemsize, maker = self._program.itemsizes[value], self.makers.get(value)
        if itemsize != 4 or maker is None:
            return itemsize
        if maker.kind is not Kind.LOOP and maker.name != "gather" and not is_product(maker):
            return itemsize
        is_reduced = lambda reader: maker.kind is Kind.LOOP and is_reduction(reader)
        readers = [reader for reader in self.readers_of(value) or () if not is_reduced(reader)]
        return 2 if readers and all(map(_rounds, readers)) else itemsize

    @functools.cached_property
    def following(self) -> frozenset[Node]:
        """The loops that are all that reads a product, or another of them, but for comparisons, whose bits are stored:
        the product computes them."""
        found: set[Node] = set()
        for node in _nodes(self._program.body):  # in their order: what a node reads is made before it
            if (
                node.kind is Kind.LOOP
                and node.name not in _ENDING_CHAINS
                and any(self._is_followed(maker, node, found) for maker in self._makers_of(node))
            ):
                found.add(node)
        return frozenset(found)

    def goes_on(self, node: Node, reader: Node) -> bool:
        """Whether a product that computes a loop over elements, a `node`, computes its `reader` too."""
        return reader in self.following and self._is_followed(node, reader, self.following)

    def ends(self, node: Node) -> bool:
        """Whether a product computes a loop over elements, a `node`, and nothing else reads what the loop reads of it:
        that is stored nowhere then."""
        if node not in self.following:
            return False
        made = [maker for maker in self._makers_of(node) if self._is_followed(maker, node, self.following)]
        return all(reader is node for maker in made for reader in self.readers_of(maker.outputs[0]) or ())

    def sums_product(self, node: Node) -> bool:
        """Whether an all-reduce sums what a product makes, such as logits whose weight is split by rows. It writes over
        that (`all-reduce.194` of `gpt2_medium/megatron/32`), and not over what scatters and gathers make."""
        makers = self._makers_of(node)
        is_summed = node.name in ("all_reduce", "psum", "psum_invariant") and bool(makers)
        return is_summed and all(is_product(maker) or maker in self.following for maker in makers)

    def _makers_of(self, node: Node) -> list[Node]:
        return [maker for maker in map(self.maker_behind, node.inputs) if maker is not None]

    def _is_followed(self, maker: Node, node: Node, following: Set[Node]) -> bool:
        """Whether a product that a `maker` is, or computes it, computes a `node` too that reads what it makes."""
        if not is_product(maker) and (maker not in following or is_reduction(maker)):
            return False
        if maker.name == "dot_general" and self._is_of_one(maker):
            return False
        readers = None if maker.name in ("sort", "concatenate") else self.readers_of(maker.outputs[0])
        return readers is not None and all(each is node or each.name in _COMPARES for each in readers)

    def _is_of_one(self, product: Node) -> bool:
        """Whether one of several batch dims of a product has one element on a device. The compiler takes that dim out
        of the product, and a view stands between it and what reads it (`fusion.659` of `mixture/fsdp/256`)."""
        _, (batch, _) = product.params["dimension_numbers"]
        part = self._program.part_of(product.outputs[0])[: len(batch)]
        return len(part) > 1 and 1 in part

    def compared_products(self) -> set[int]:
        """Returns the results of comparisons of what products make, such as a rectifier's of its operand, where else
        only what products read is made of it: the comparison is stored, with the other, and not what is compared. Only
        loops over elements read such a result, and no loop or branch hands it on."""
        return {
            result for node in _nodes(self._program.body) if self._compares_product(node) for result in node.outputs
        }

    def _compares_product(self, node: Node) -> bool:
        if node.kind is not Kind.LOOP or node.name not in _COMPARES:
            return False
        elements = lambda made: self._program.bytes_of(made) // self._program.itemsizes[made]
        (result,) = node.outputs
        whole = [value for value in node.inputs if elements(value) >= elements(result) and not self._is_spread(value)]
        maker = self.maker_behind(whole[0]) if len(whole) == 1 else None
        if maker is None or is_reduction(maker) or not (is_product(maker) or maker in self.following):
            return False
        using, readers = self.readers_of(result), self.readers_of(maker.outputs[0])
        if using is None or readers is None or any(reader.kind is not Kind.LOOP for reader in using):
            return False
        return all(each.name in _COMPARES or self._is_rounded(each) for each in readers)

    def _is_spread(self, value: int) -> bool:
        """Whether a value repeats a smaller one."""
        maker = self.maker_behind(value)
        return maker is not None and (maker.kind is Kind.MADE or maker.name == "broadcast_in_dim")

    def _is_rounded(self, node: Node) -> bool:
        """Whether a loop over elements is read by products alone, which round it."""
        readers = self.readers_of(node.outputs[0]) if node.kind is Kind.LOOP else None
        return bool(readers) and all(map(_rounds, readers))


def _nodes(region: Region) -> list[Node]:
    return [each for node in region.nodes for each in (*(n for inner in node.regions for n in _nodes(inner)), node)]


def is_reduction(node: Node) -> bool:
    """Whether a node sums elements, or takes the largest of them and the like: no window's, and not between devices."""
    return node.kind is Kind.LOOP and node.name.startswith("reduce_")


def is_product(node: Node) -> bool:
    """Whether a node is a matrix product or a convolution."""
    return node.name in ("dot_general", "conv_general_dilated")


def widens(program: Program, node: Node) -> bool:
    """Whether a node only converts what it reads to a wider type."""
    itemsizes = program.itemsizes
    return node.name == "convert_element_type" and itemsizes[node.outputs[0]] > itemsizes[node.inputs[0]]


def repeats(program: Program, node: Node, value: int) -> bool:
    """Whether a loop repeats what it reads of a `value` a few times between other dims, as the gradient of a maximum
    over windows does: a TPU's compiler stores what is repeated."""
    part, whole = program.part_of(value), program.part_of(node.outputs[0])
    if node.name == "broadcast_in_dim":
        at = dict(zip(node.params["broadcast_dimensions"], part, strict=True))
        part = tuple(at.get(dim, 1) for dim in range(len(whole)))
    if len(part) != len(whole) or len(part) < 5:
        return False
    if any(here not in (1, there) for here, there in zip(part, whole, strict=True)):
        return False
    new = [dim for dim, (here, there) in enumerate(zip(part, whole, strict=True)) if here < there]
    own = [dim for dim, here in enumerate(part) if here > 1]
    times = math.prod(whole[dim] for dim in new)
    is_between = bool(new and own) and own[0] < new[-1] and new[0] < own[-1] == len(part) - 1
    return is_between and times <= _FEW_TIMES


def _rounds(node: Node) -> bool:
    """Whether a node is a product whose operands of four bytes are rounded to two: of floating-point numbers, and of no
    higher precision than the default."""
    if not is_product(node):
        return False
    precision, kind = node.params["precision"], node.params["preferred_element_type"]
    asked = precision if isinstance(precision, tuple) else (precision,)
    is_default = all(each is None or each == lax.Precision.DEFAULT for each in asked)
    return is_default and (kind is None or bool(jnp.issubdtype(kind, jnp.floating)))
