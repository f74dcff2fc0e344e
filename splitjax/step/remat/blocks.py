"""Finds the repeated blocks of a loss: layers of one make that follow each other, and the bodies of scans over layers.

The forward jaxpr of a gradient boundary comes in; where its blocks stand comes out. Blocks are told by the paths of the
parameters that they read: those that differ in one number alone, and have the same arrays behind it, are blocks of one
name. What is computed between two of them is cut where the fewest bytes live, which is behind the residual sum of the
first in most models.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from splitjax import _compat
from splitjax.primitives.calls import CallKind, kind_of, scan_parts
from splitjax.primitives.walk import walk_inside

_NUMBER = re.compile(r"\d+")
_KEY = re.compile(r"[^\[\]'\".]+")
# Which differentiated operands a value is made of alone, by path; None for one that depends on the batch.
Origin = frozenset[str] | None
# Why blocks that repeat each other cannot be computed again, as a clause behind their name.
_IN_TURNS = "are not computed one after the other: their parameters are used in turns with others'"
_HAVE_EFFECTS, _KEEP_THEMSELVES = "have side effects", "say themselves what they keep, by jax.checkpoint"


@dataclasses.dataclass(frozen=True)
class Span:
    """Is one block of a jaxpr: the equations from `start` to before `end`; with `is_loop` the body of the scan that
    stands at `start`. `name`: of all blocks of its make."""

    name: str
    start: int
    end: int
    is_loop: bool = False


def operand_path(name: str) -> str:
    """Returns the path of an operand of a boundary from its `name`: `params/block1/w` of `params['block1']['w']`."""
    return "/".join(_KEY.findall(name))


def makes_of(params: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, tuple[str, str]]:
    """Returns by path of a parameter (name of the blocks of its make, which of these it is in); parameters of no
    repeated block are absent.

    **Arguments:** `params`: shape and dtype by path."""
    found: dict[str, tuple[str, str]] = {}
    split = {path: path.split("/") for path in params}
    for depth in range(max(map(len, split.values()), default=0)):
        arrays: dict[tuple[str, str], list[tuple[object, ...]]] = {}
        paths: dict[tuple[str, str], list[str]] = {}
        for path, parts in split.items():
            if path not in found and len(parts) > depth and _NUMBER.search(parts[depth]):
                name = "/".join((*parts[:depth], _NUMBER.sub("*", parts[depth])))
                block = name, "/".join(parts[: depth + 1])
                arrays.setdefault(block, []).append((tuple(parts[depth + 1 :]), *params[path]))
                paths.setdefault(block, []).append(path)
        makes: dict[tuple[str, object], list[tuple[str, str]]] = {}
        for block, has in arrays.items():
            makes.setdefault((block[0], frozenset(has)), []).append(block)
        repeated = [blocks for blocks in makes.values() if len(blocks) > 1]
        names = [blocks[0][0] for blocks in repeated]
        for blocks in repeated:
            name, first = blocks[0]
            unique = name if names.count(name) == 1 else f"{name} like {first}"
            found.update({path: (unique, block[1]) for block in blocks for path in paths[block]})
    return found


def spans_of(jaxpr: Any, origins: Sequence[Origin], makes: Mapping[str, tuple[str, str]]) -> list[Span]:
    """Returns the blocks of a jaxpr in the order of the program, without those that stand in calls within it.

    **Arguments:** `jaxpr`: open. `origins`: of its inputs. `makes`: as `makes_of` returns it. Blocks with side effects,
    those that overlap others, and those that say themselves what they keep (`jax.checkpoint`) are left out, with all of
    their make (`refused_in`); so are loops within blocks."""
    return _cut(jaxpr, origins, makes)[0]


def refused_in(jaxpr: Any, origins: Sequence[Origin], makes: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """Returns by name why blocks of a jaxpr are left out, as a clause. **Arguments:** as of `spans_of`."""
    return _cut(jaxpr, origins, makes)[1]


def _cut(
    jaxpr: Any, origins: Sequence[Origin], makes: Mapping[str, tuple[str, str]]
) -> tuple[list[Span], dict[str, str]]:
    """Returns the blocks, and why others are refused, by name."""
    of_value = dict(zip(jaxpr.invars, origins, strict=True))
    uses: list[tuple[int, str]] = []
    found: list[Span] = []
    for index, (eqn, read) in enumerate(_read(jaxpr, of_value)):
        owners = [{makes[path][1] if path in makes else path for path in origin} for origin in read]
        # What is made of several blocks together, such as a penalty on all weights, is a part of none.
        alone = frozenset[str]().union(*(each for each in owners if len(each) == 1))
        uses += [(index, owner) for owner in sorted(alone)]
        scanned = _scanned(eqn, of_value)
        if scanned:
            found.append(Span(_common(scanned), index, index + 1, is_loop=True))
    name_of = {block: name for name, block in makes.values()}
    live = _live_bytes(jaxpr, of_value)
    refused: dict[str, str] = {}
    for block in dict.fromkeys(owner for _, owner in uses if owner in name_of):
        span = _span(block, name_of[block], uses, live, len(jaxpr.eqns))
        if span is None:
            refused[name_of[block]] = _IN_TURNS
        else:
            found.append(span)
    refused |= {span.name: why for span in found if (why := _why_once(jaxpr, span))}
    blocks = [span for span in found if not span.is_loop]
    found = [span for span in found if not any(_is_within(span, block) for block in blocks)]
    kept = sorted((span for span in found if span.name not in refused), key=lambda span: span.start)
    counts = {name: sum(span.name == name for span in kept) for name in {span.name for span in kept}}
    return [span for span in kept if span.is_loop or counts[span.name] > 1], refused


def origins_in(jaxpr: Any, origins: Sequence[Origin]) -> dict[Any, Origin]:
    """Returns what every value of an open `jaxpr` is made of. `origins`: of its inputs."""
    of_value = dict(zip(jaxpr.invars, origins, strict=True))
    for _ in _read(jaxpr, of_value):
        pass
    return of_value


def operand_origins(eqn: Any, of_value: Mapping[Any, Origin]) -> list[Origin]:
    """Returns what each operand of an equation is made of; literals and constants of nothing."""
    return [
        frozenset() if isinstance(atom, _compat.Literal) else of_value.get(atom, frozenset()) for atom in eqn.invars
    ]


def _read(jaxpr: Any, of_value: dict[Any, Origin]) -> Iterator[tuple[Any, list[frozenset[str]]]]:
    """Yields every equation with what the arrays are made of that it brings together with what depends on the batch,
    and notes in `of_value` what its results are made of. A number that is made of parameters, such as the penalty on
    one weight, is no array."""
    for eqn in jaxpr.eqns:
        operands = operand_origins(eqn, of_value)
        made = frozenset(itertools.chain.from_iterable(each for each in operands if each is not None))
        is_pure = all(each is not None for each in operands)
        of_value.update({out: made if is_pure else None for out in eqn.outvars})
        arrays = (origin for atom, origin in zip(eqn.invars, operands, strict=True) if atom.aval.shape != ())
        yield eqn, [] if is_pure else [origin for origin in arrays if origin]


def _scanned(eqn: Any, of_value: Mapping[Any, Origin]) -> list[str]:
    """Returns the parameters of which a scan has a slice in every turn: the layers that it goes over."""
    if kind_of(eqn) is not CallKind.SCAN:
        return []
    xs = scan_parts(eqn, operand_origins(eqn, of_value)).xs
    return sorted({path for origin in xs if origin is not None for path in origin})


def _is_within(span: Span, block: Span) -> bool:
    """Whether `span` is a loop within a `block`."""
    return span.is_loop and block.start <= span.start < block.end


def _common(paths: Sequence[str]) -> str:
    """Returns the longest path that all of `paths` begin with; the first of them where they have none in common."""
    split = [path.split("/") for path in paths]
    shared = [parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*split, strict=False))]
    return "/".join(shared) or paths[0]


def _span(block: str, name: str, uses: Sequence[tuple[int, str]], live: Sequence[int], num_eqns: int) -> Span | None:
    """Returns where a block stands; None where another's parameters are read within it."""
    own = [index for index, owner in uses if owner == block]
    first, last = min(own), max(own)
    others = [index for index, owner in uses if owner != block]
    if any(first <= index <= last for index in others):
        return None
    before = max((index for index in others if index < first), default=-1)
    after = min((index for index in others if index > last), default=num_eqns)
    least = lambda places: min(places, key=lambda place: (live[place], place))
    return Span(name, least(range(before + 1, first + 1)), least(range(last + 1, after + 1)))


def _live_bytes(jaxpr: Any, of_value: Mapping[Any, Origin]) -> list[int]:
    """Returns how many bytes of results that depend on the batch live before each equation, and at the end."""
    num_eqns = len(jaxpr.eqns)
    made = {out: index for index, eqn in enumerate(jaxpr.eqns) for out in eqn.outvars}
    last: dict[Any, int] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        last.update({atom: index for atom in eqn.invars if not isinstance(atom, _compat.Literal)})
    last.update({atom: num_eqns for atom in jaxpr.outvars if not isinstance(atom, _compat.Literal)})
    changes = [0] * (num_eqns + 2)
    for value, index in made.items():
        if value in last and of_value.get(value) is None:
            size = value.aval.size * getattr(value.aval.dtype, "itemsize", 1)
            changes[index + 1] += size
            changes[last[value] + 1] -= size
    return list(itertools.accumulate(changes))[: num_eqns + 1]


def _why_once(jaxpr: Any, span: Span) -> str:
    """Returns why a block cannot be computed again; empty where it can."""
    eqns = jaxpr.eqns[span.start : span.end]
    if any(map(_keeps_itself, eqns)):
        return _KEEP_THEMSELVES
    return _HAVE_EFFECTS if any(eqn.effects for eqn in eqns) else ""


def _keeps_itself(eqn: Any) -> bool:
    inside: Iterable[Any] = (visit.eqn for visit in walk_inside(eqn))
    return kind_of(eqn) is CallKind.REMAT or any(kind_of(each) is CallKind.REMAT for each in inside)
