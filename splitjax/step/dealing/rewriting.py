"""Rewrites products with fused weights so that devices have what is cut apart behind them.

A step's jaxpr comes in, and the products whose results are cut into parts; the same step comes out, in which the weight
is dealt out to a number of devices before the product (`primitives.dealt`), and each part is taken from the devices'
shares behind it. The numbers are the same: columns change places, and places back.

How it works: the body in which such a product stands is traced again (`rewritten`), with its result as a `Dealt` value
instead of an array (`values`, `acting`). What the parts are is found before (`find_parts`), by the same rules over
values without numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any

from splitjax import _compat
from splitjax.primitives import interpreter
from splitjax.primitives.calls import CallKind, call_body, inline_body, kind_of
from splitjax.primitives.dealt import COPY, DEAL
from splitjax.primitives.interpreter import RunBody, Selective
from splitjax.primitives.walk import Site, bodies, equation_at, with_changed_body
from splitjax.step.dealing.acting import NOTED, Acting, padded_parts
from splitjax.step.dealing.hoisting import with_deals_before
from splitjax.step.dealing.values import Dealt, FusedProduct, as_array
from splitjax.step.per_microbatch import is_per_microbatch
from splitjax.step.recurrent.entering import Entering, entering, is_entered

# What takes parts of a weight out of what devices have of it, where some of them are copied.
_OF_SHARES = frozenset({"slice", "concatenate", COPY})


@dataclasses.dataclass(frozen=True)
class Parts:
    """Says what the result of a product is cut into along a dim of its weight.

    - `sizes`: of the parts. `stored`: their sizes with the padding that the program puts behind each.
    - `heads`: by part, how many heads it is made of, where that shows; else None.
    """

    sizes: tuple[int, ...]
    stored: tuple[int, ...]
    heads: tuple[int | None, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """By part, what devices share: its heads, or its columns where none show."""
        return tuple(size if heads is None else heads for size, heads in zip(self.sizes, self.heads, strict=True))

    def fit(self, num: int) -> bool:
        """Tells whether every part, and its heads, can be dealt out to `num` devices."""
        return all(self._fitting(num))

    def _fitting(self, num: int) -> tuple[bool, ...]:
        """Tells of every part whether it, and its heads, can be dealt out to `num` devices."""
        return tuple(
            size % num == 0 and (heads is None or heads % num == 0)
            for size, heads in zip(self.stored, self.heads, strict=True)
        )

    def copied(self, num: int) -> tuple[bool, ...] | None:
        """Tells of every part whether it holds fewer heads than `num` devices, which share each of them evenly, so that
        it is copied where the others are dealt out. None where some parts are neither dealt out nor copied, or what is
        copied is padded, or lies side by side in a number of columns that devices do not divide."""
        is_copied = tuple(not fits for fits in self._fitting(num))
        counts = [count for count, own in zip(self.counts, is_copied, strict=True) if own]
        if self.sizes != self.stored or all(is_copied) or any(count > num or num % count for count in counts):
            return None
        runs = itertools.groupby(zip(self.sizes, is_copied, strict=True), lambda part: part[1])
        return is_copied if all(sum(size for size, _ in run) % num == 0 for _, run in runs) else None


def find_parts(jaxpr: _compat.ClosedJaxpr, products: Sequence[tuple[Site, int, int, int]]) -> list[Parts | None]:
    """Returns, for each of the `products`, the parts into which its result is cut along a dim of its weight; None where
    it is not cut, is used otherwise than in parts, or has its weight dealt out already. Products that are added up are
    cut alike, or none of them is.

    **Arguments:** `jaxpr`: the step. `products`: by site, position of the weight, its dim, and the number of devices to
    which it would be dealt out; a site stands there once."""
    by_body: dict[Site, dict[Site, FusedProduct]] = {}
    dealt = functools.cache(functools.partial(_dealt_in, jaxpr))
    for site, weight, dim, num in products:
        eqn = equation_at(jaxpr, site)
        if eqn is not None and eqn.primitive.name == "dot_general" and eqn.invars[weight] not in dealt(site[:-1]):
            at = _body_around(jaxpr, site)
            columns = (eqn.invars[weight].aval.shape[dim],)
            target = FusedProduct(site[at:], weight, dim, columns, columns, num)
            by_body.setdefault(site[:at], {})[target.site] = target
    found: dict[Site, Parts | None] = {}
    for prefix, targets in by_body.items():
        probe, inner = _Probe(targets), _compat.open_jaxpr(_body_at(jaxpr, prefix))[0]
        for result in probe.fold(inner, [None] * len(inner.invars), ()):
            if isinstance(result, Dealt):
                probe.use(result)
        probe.agree()
        found |= {(*prefix, *site): seen.parts() for site, seen in probe.found.items()}
    return [found.get(site) for site, *_ in products]


def rewritten(jaxpr: _compat.ClosedJaxpr, products: Sequence[FusedProduct]) -> _compat.ClosedJaxpr:
    """Returns the step `jaxpr` with the weights of `products` dealt out. What has no such product at its site, as
    another trace of the step may have not, is left alone."""
    by_body: dict[Site, list[FusedProduct]] = {}
    for product in products:
        eqn = equation_at(jaxpr, product.site)
        if eqn is None or eqn.primitive.name != "dot_general":
            continue
        if eqn.invars[product.weight].aval.shape[product.dim] != sum(product.stored):
            continue
        at = _body_around(jaxpr, product.site)
        target = dataclasses.replace(product, site=product.site[at:])
        by_body.setdefault(product.site[:at], []).append(target)
    # Inner bodies first: equations of a body that is traced again have other numbers, and sites lead through them.
    for prefix, targets in sorted(by_body.items(), key=lambda item: -len(item[0])):
        jaxpr = with_changed_body(jaxpr, prefix, lambda body, targets=targets: _retraced(body, targets))
    return with_deals_before(jaxpr) if by_body else jaxpr


def _dealt_in(jaxpr: Any, prefix: Site) -> frozenset[Any]:
    """Returns the variables of the body at `prefix` that are weights which were dealt out before: by the operation, or
    each by itself, in shares, and then laid side by side within these."""
    inner = _compat.open_jaxpr(_body_at(jaxpr, prefix))[0]
    dealt: set[Any] = set()
    call = equation_at(jaxpr, prefix[:-1]) if prefix else None
    if call is not None and is_entered(call):
        before = _dealt_in(jaxpr, prefix[:-2])
        dealt.update(v for v, outer in zip(inner.invars, call.invars, strict=True) if _is_in(outer, before))
    shares: dict[Any, int] = {}  # by variable, the dim that counts them: it was cut out of the next one
    for eqn in inner.eqns:
        name = eqn.primitive.name
        if name == DEAL:
            dealt.update(eqn.outvars)
            shares[eqn.outvars[0]] = eqn.params["dim"]
        elif name in _OF_SHARES and all(_is_in(v, dealt) for v in eqn.invars):
            dealt.update(eqn.outvars)
        elif name == "reshape":
            before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
            at = next((d for d, (one, other) in enumerate(zip(before, after, strict=False)) if one != other), None)
            if at is not None and (*after[:at], math.prod(after[at : at + 2]), *after[at + 2 :]) == before:
                shares[eqn.outvars[0]] = at
        elif name == "slice" and _is_in(eqn.invars[0], dealt):
            dealt.update(eqn.outvars)
        elif name == "concatenate" and {
            None if isinstance(v, _compat.Literal) else shares.get(v) for v in eqn.invars
        } == {eqn.params["dimension"] - 1}:
            dealt.update(eqn.outvars)
    return frozenset(dealt)


def _is_in(operand: Any, variables: Collection[Any]) -> bool:
    """Tells whether an operand is one of the `variables`; literals cannot be hashed."""
    return not isinstance(operand, _compat.Literal) and operand in variables


def _body_around(jaxpr: Any, site: Site) -> int:
    """Returns how much of a site leads to the outermost body between which and its equation there are only calls that
    mean their body, and those that dealt values enter."""
    body, found = jaxpr, 0
    for start in range(0, len(site) - 2, 2):
        eqn = _compat.open_jaxpr(body)[0].eqns[site[start]]
        body = bodies(eqn)[site[start + 1]]
        if kind_of(eqn) is not CallKind.INLINE and not is_entered(eqn):
            found = start + 2
    return found


def _body_at(jaxpr: Any, prefix: Site) -> Any:
    """Returns the body to which `prefix` leads."""
    return bodies(equation_at(jaxpr, prefix[:-1]))[prefix[-1]] if prefix else jaxpr


def _retraced(body: Any, targets: Sequence[FusedProduct]) -> Any:
    """Returns a body with the weights of the targets dealt out, as what it is: open or closed."""
    return _Rewriting({target.site: target for target in targets}).retraced(body, (), ())


class _Rewriting(Acting):
    """Evaluates equations with dealt values. `targets`: by site, the products whose weights are dealt out."""

    def __init__(self, targets: dict[Site, FusedProduct]) -> None:
        super().__init__()
        self._targets = targets
        self._around = {site[:depth] for site in targets for depth in range(1, len(site), 2)}
        self._handler = Selective(self.handle, NOTED, {*targets, *self._around}, Dealt)

    def retraced(self, body: Any, site: Site, entered: Sequence[Entering]) -> Any:
        """Returns the body that stands behind `site` with dealt values, as what it is: open or closed. `entered`: what
        it gets, where dealt values may be among that."""
        inner, _ = _compat.open_jaxpr(body)
        dealt = [each.inside for each in entered] or [None] * len(inner.invars)

        def run(constants: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
            values = [
                value if inside is None else inside.with_value(value, ())
                for value, inside in zip(operands, dealt, strict=True)
            ]
            results = interpreter.evaluate(inner, values, self._handler, site, constants=list(constants))
            return [as_array(value) for value in results]

        shapes = {number: each.shape for number, each in enumerate(entered) if each.inside is not None}
        return interpreter.retraced(body, run, shapes)

    def handle(self, eqn: Any, values: list[Any], site: Site, run: RunBody) -> list[Any] | None:
        """Is the handler of the evaluation."""
        if eqn.primitive.name in NOTED and not any(isinstance(value, Dealt) for value in values):
            self.made[eqn.outvars[0]] = eqn, list(values)
            return None
        if site in self._targets:
            return self.product(eqn, values, self._targets[site])
        if is_entered(eqn):
            found = entering(eqn, values)
            body = self.retraced(bodies(eqn)[0], (*site, 0), found)
            return _compat.bind_equation(_compat.with_params(eqn, jaxpr=body), [each.operand for each in found])
        body = None if is_per_microbatch(eqn) else inline_body(eqn)
        if body is not None:
            return run(body, 0, values)
        results = self.act(eqn, values)
        if results is None:
            values[:] = map(as_array, values)
        return results


class _Seen:
    """Collects how the result of a product is used.

    **Attributes:** `is_fit`: whether in parts alone. `columns`: the number of its columns. `ends`: where parts begin
    and end. `heads`: by first and number of the columns of a part, how many heads it is made of. `cut`: the parts that
    are cut out, by the same. `padded`: of those that are padded, the size with that, and how many heads there are then.
    """

    def __init__(self, columns: int) -> None:
        self.is_fit = True
        self.columns = columns
        self.ends: set[int] = {0, columns}
        self.heads: dict[tuple[int, int], int] = {}
        self.cut: set[tuple[int, int]] = set()
        self.padded: dict[tuple[int, int], tuple[int, int | None]] = {}

    def parts(self) -> Parts | None:
        """Returns the parts; None where there are none, or the whole is used."""
        padded = self.padded if self._keeps_padding() else {}
        ends = sorted(self.ends | {end for first, size in padded for end in (first, first + size)})
        if not self.is_fit or len(ends) < 3:
            return None
        spans = [(start, stop - start) for start, stop in zip(ends[:-1], ends[1:], strict=True)]
        spans = spans[:-1] if padded else spans
        known = [padded.get(span, (span[1], self.heads.get(span))) for span in spans]
        return Parts(tuple(size for _, size in spans), tuple(n for n, _ in known), tuple(heads for _, heads in known))

    def _keeps_padding(self) -> bool:
        """Tells whether the last columns, which nobody reads, are the padding of the parts: what a program pads by
        itself has none there."""
        padding = sum(large - size for (_, size), (large, _) in self.padded.items())
        known = self.columns - padding
        inside = all(first + size <= known for first, size in (*self.cut, *self.padded))
        return 0 < padding < self.columns and known in self.ends and inside

    def note(self, eqn: Any, before: Dealt, part: Dealt) -> None:
        """Notes what an equation that makes `part` of `before` shows."""
        span = part.first, part.columns
        if eqn.primitive.name in ("split", "slice"):
            self.cut.add(span)
            self.ends |= {part.first, part.first + part.columns}
            if len(part.split) >= 3 and part.split[0] == 1:
                self.heads[span] = part.split[1]
            elif len(part.split) == 2 and before.split[0] > 3:
                self.heads[span] = part.split[0]
        elif eqn.primitive.name == "reshape" and len(part.split) > 1:
            self.heads.setdefault(span, part.split[0])


class _Probe(Acting):
    """Finds the parts into which the results of products are cut: folds a body over values without numbers.

    `targets`: the products, by site. **Attributes:** `found`: by site, what is known of each.
    """

    def __init__(self, targets: dict[Site, FusedProduct]) -> None:
        super().__init__()
        self._targets = targets
        self._leading = {site[:depth] for site in targets for depth in range(1, len(site))}
        self.found = {site: _Seen(target.sizes[0]) for site, target in targets.items()}
        self._added: set[tuple[Site, ...]] = set()

    def fold(self, jaxpr: Any, operands: Sequence[Any], prefix: Site) -> list[Any]:
        """Folds a body that stands behind `prefix`; arrays are None."""
        inner, _ = _compat.open_jaxpr(jaxpr)
        equation = lambda index, eqn, values: self._equation((*prefix, index), eqn, values)
        return interpreter.fold(inner, operands, equation, lambda atom: None, [None] * len(inner.constvars))

    def agree(self) -> None:
        """Gives products that are added up, one with the next, the parts of all of them; none where one of them cannot
        be cut, or where they are for different numbers of devices."""
        groups: list[set[Site]] = []
        for added in self._added:
            apart = [group for group in groups if group.isdisjoint(added)]
            groups = [*apart, set(added).union(*(group for group in groups if not group.isdisjoint(added)))]
        for group in groups:
            seen = [self.found[site] for site in group]
            is_fit = all(each.is_fit for each in seen) and len({self._targets[site].num for site in group}) == 1
            ends = set[int]().union(*(each.ends for each in seen))
            heads = {span: count for each in seen for span, count in each.heads.items()}
            padded = {span: found for each in seen for span, found in each.padded.items()}
            cut = set[tuple[int, int]]().union(*(each.cut for each in seen))
            for each in seen:
                each.is_fit, each.ends, each.heads, each.padded, each.cut = is_fit, ends, heads, padded, cut

    def use(self, value: Dealt) -> None:
        """Notes that a value is needed as an array."""
        for product in value.products:
            self.found[product].is_fit &= value.is_part

    def _note_padding(self, eqn: Any, value: Dealt) -> None:
        """Notes how an equation pads the parts of a value."""
        padding = padded_parts(eqn, value)
        assert padding is not None, "the values' rules say so"
        spans = [(value.first + number * padding.size, padding.size) for number in range(padding.count)]
        for product in value.products:
            self.found[product].padded |= dict.fromkeys(spans, (padding.stored, padding.heads))

    def _enter(self, site: Site, eqn: Any, values: Sequence[Any]) -> None:
        """Folds the body of a loop or a rematerialised call, whose results are arrays."""
        found = entering(eqn, values)
        for value, each in zip(values, found, strict=True):
            if isinstance(value, Dealt) and each.inside is None:
                self.use(value)
        for result in self.fold(bodies(eqn)[0], [each.inside for each in found], (*site, 0)):
            if isinstance(result, Dealt):
                self.use(result)

    def _equation(self, site: Site, eqn: Any, values: Sequence[Any]) -> list[Any]:
        nothing = [None] * len(eqn.outvars)
        dealt = [value for value in values if isinstance(value, Dealt)]
        if eqn.primitive.name in NOTED and not dealt:
            self.made[eqn.outvars[0]] = eqn, list(values)
            return nothing
        if kind_of(eqn) is CallKind.INLINE and (dealt or site in self._leading):
            return self.fold(call_body(eqn), values, (*site, 0))
        if is_entered(eqn) and (dealt or site in self._leading):
            self._enter(site, eqn, values)
            return nothing
        results = self.act(eqn, values) if dealt else nothing
        if results is None:
            for value in dealt:
                self.use(value)
        elif dealt and eqn.primitive.name == "pad":
            self._note_padding(eqn, dealt[0])
        elif dealt:
            self._added |= {each.products for each in results if isinstance(each, Dealt) and len(each.products) > 1}
            for result in results:
                if isinstance(result, Dealt) and result.is_part:
                    for product in result.products:
                        self.found[product].note(eqn, dealt[0], result)
        if site in self._targets:
            return self.product(eqn, [None] * len(eqn.invars), self._targets[site])
        return nothing if results is None else results
