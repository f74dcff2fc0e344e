"""A compiled program as text that is equal where the program is: a canonical form of XLA's HLO modules.

Names, ids, channels and metadata (scopes, source lines) are left out; instructions are numbered in post-order from the
root of their computation, operands in their order, and computations in the order in which they are first called. So
neither the order in which a computation was built nor what it is called matters, and shapes, layouts, constants,
operand order, groups of collectives and aliases of arguments do. What no result depends on (an instruction with an
effect, say) comes last, in an order by its content.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_HEADER = re.compile(r"HloModule [^\s,]+,?\s*(.*)")
_COMPUTATION = re.compile(r"(ENTRY )?%([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.\-]+) = (.*)$")
# A reference outside of a string in quotes, or such a string.
_REFERENCE = re.compile(r'%([\w.\-]+)|"(?:[^"\\]|\\.)*"')
_COMMENT = re.compile(r"/\*.*?\*/")
_CHANNEL = re.compile(r"\bchannel_id=\d+")
_PREDECESSORS = re.compile(r"control-predecessors=\{([^}]*)\}")
_SPECIAL = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{}, ]')
_OPENING, _CLOSING = "([{", ")]}"
# Attributes that say where an instruction comes from.
_ORIGINS = ("metadata", "origin")


class ModuleError(ValueError):
    """Text that is not understood as an HLO module."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction, in pieces. `operands` and `called`: names. `literal`: what stands between the parentheses
    instead of operands. `attributes`: with `%` for each computation of `called`, in their order."""

    name: str
    shape: str
    opcode: str
    literal: str
    attributes: str
    operands: tuple[str, ...]
    predecessors: tuple[str, ...]
    called: tuple[str, ...]

    @property
    def before(self) -> tuple[str, ...]:
        """What has to run before it."""
        return self.operands + self.predecessors


@dataclasses.dataclass(frozen=True)
class Computation:
    """`instructions` by name, in the order of the text."""

    name: str
    root: str
    instructions: Mapping[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Module:
    """`header`: what its first line says besides its name."""

    header: str
    entry: str
    computations: Mapping[str, Computation]


def canonical_program(compiled: Any) -> str:
    """The canonical text of what `step.lower(...).compile()` returns: of each of its programs, where it has several."""
    parts: Mapping[str, Any] = getattr(compiled, "parts", None) or {"": compiled}
    lines: list[str] = []
    for name, part in parts.items():
        lines += [f"PROGRAM {name}".rstrip(), *(canonical_module(text) for text in texts(part))]
    return "\n".join(lines)


def texts(compiled: Any) -> list[str]:
    """The HLO modules of a `jax.stages.Compiled` as text with all of their constants, and without metadata."""
    from jaxlib import _hlo  # XLA's own Python classes: there is no public name for how a module is printed

    options = _hlo.HloPrintOptions()
    options.print_large_constants = True
    options.print_metadata = False
    return [module.to_string(options) for module in compiled.runtime_executable().hlo_modules()]


def canonical_module(text: str) -> str:
    """The canonical form of a module's text. Raises `ModuleError`."""
    module = parse(text)
    hashes: dict[str, bytes] = {}
    numbers: dict[str, int] = {module.entry: 0}
    waiting, lines = [module.entry], [f"MODULE {module.header}"]
    for name in waiting:  # grows
        computation = module.computations[name]
        lines.append(f"COMPUTATION {numbers[name]}")
        order = _post_order(module, computation, hashes)
        position = {instruction: number for number, instruction in enumerate(order)}
        for instruction in order:
            one = computation.instructions[instruction]
            for called in one.called:
                if called not in numbers:
                    numbers[called] = len(numbers)
                    waiting.append(called)
            lines.append(_line(one, position, numbers, instruction == computation.root))
    return "\n".join(lines) + "\n"


def _line(one: Instruction, position: Mapping[str, int], numbers: Mapping[str, int], is_root: bool) -> str:
    called = iter(one.called)
    attributes = re.sub("%", lambda _: f"@{numbers[next(called)]}", one.attributes) if one.called else one.attributes
    inside = ", ".join(f"%{position[operand]}" for operand in one.operands) if one.operands else one.literal
    after = f", after {' '.join(str(position[name]) for name in one.predecessors)}" if one.predecessors else ""
    return f"{'ROOT ' if is_root else ''}%{position[one.name]} = {one.shape} {one.opcode}({inside}){attributes}{after}"


def _post_order(module: Module, computation: Computation, hashes: dict[str, bytes]) -> list[str]:
    """The names of a computation's instructions: behind the root come those that nothing needs, in an order by
    content."""
    used = {name for one in computation.instructions.values() for name in one.before}
    ends = [name for name in computation.instructions if name not in used and name != computation.root]
    by_content: dict[str, bytes] = {}
    if len(ends) > 1:
        by_content = _content(module, computation, hashes)
    order: dict[str, None] = {}
    for end in (computation.root, *sorted(ends, key=lambda name: by_content.get(name, b""))):
        order.update(dict.fromkeys(_reached(computation, end, order)))
    return list(order)


def _reached(computation: Computation, end: str, done: Mapping[str, Any]) -> Iterator[str]:
    """What an instruction needs that is not done, each behind what it needs itself, and then the instruction."""
    stack, seen = [(end, iter(computation.instructions[end].before))], {end}
    while stack:
        name, rest = stack[-1]
        for needed in rest:
            if needed not in seen and needed not in done:
                if needed not in computation.instructions:
                    raise ModuleError(f"{name} in {computation.name} needs {needed}, which is not there")
                seen.add(needed)
                stack.append((needed, iter(computation.instructions[needed].before)))
                break
        else:
            yield name
            stack.pop()


def _content(module: Module, computation: Computation, hashes: dict[str, bytes]) -> dict[str, bytes]:
    """For each instruction a digest of itself and of all that it needs, whatever that is called."""
    found: dict[str, bytes] = {}
    for name in computation.instructions:
        for needed in () if name in found else _reached(computation, name, found):
            one = computation.instructions[needed]
            parts = (one.shape, one.opcode, "" if one.operands else one.literal, one.attributes)
            called = (_hash(module, inner, hashes) for inner in one.called)
            data = "\0".join(parts).encode() + b"\0".join((*(found[operand] for operand in one.before), *called))
            found[needed] = hashlib.sha256(data).digest()
    return found


def _hash(module: Module, name: str, hashes: dict[str, bytes]) -> bytes:
    """A digest of a computation's content, with what it calls."""
    if name not in hashes:
        computation = module.computations[name]
        by_content = _content(module, computation, hashes)
        others = sorted(by_content.values())
        hashes[name] = hashlib.sha256(by_content[computation.root] + b"".join(others)).digest()
    return hashes[name]


def parse(text: str) -> Module:
    """Reads a module's text, as XLA prints it. Raises `ModuleError`."""
    header, entry, name, root = "", "", "", ""
    computations: dict[str, Computation] = {}
    instructions: dict[str, Instruction] = {}
    for line in text.splitlines():
        if name:
            if line.startswith("}"):
                computations[name] = Computation(name, root, instructions)
                name = ""
            elif match := _INSTRUCTION.fullmatch(line):
                one = _instruction(match[2], _COMMENT.sub("", match[3]))
                instructions[one.name] = one
                root = one.name if match[1] else root
            elif line.strip():
                raise ModuleError(f"not an instruction: {line.strip()[:200]}")
        elif match := _HEADER.match(line):
            header = _COMMENT.sub("", match[1])
        elif match := _COMPUTATION.match(line):
            name, root, instructions = match[2], "", {}
            entry = name if match[1] else entry
    if not entry:
        raise ModuleError(f"no entry computation in a text that begins {text[:80]!r}")
    return Module(header, entry, computations)


def _instruction(name: str, rest: str) -> Instruction:
    shape, rest = _split(rest, " ")
    opcode, _, rest = rest.partition("(")
    inside, rest = _split(rest, ")")
    operands = () if opcode in ("constant", "parameter") else _references(inside)
    attributes, predecessors = "", ()
    for attribute in _attributes(rest):
        key = attribute.partition("=")[0]
        if key in _ORIGINS:
            continue
        if match := _PREDECESSORS.fullmatch(attribute):
            predecessors = _references(match[1])
            continue
        attributes += ", " + _CHANNEL.sub("channel", attribute)
    called = _references(attributes)
    attributes = _REFERENCE.sub(lambda match: "%" if match[1] else match[0], attributes) if called else attributes
    if called and attributes.count("%") != len(called):
        raise ModuleError(f"a string with a per cent sign beside a called computation in {name}: {attributes[:200]}")
    return Instruction(name, shape, opcode, inside, attributes, operands, predecessors, called)


def _references(text: str) -> tuple[str, ...]:
    return tuple(match[1] for match in _REFERENCE.finditer(text) if match[1])


def _attributes(text: str) -> Sequence[str]:
    """The parts of `, key=value, key={...}`."""
    parts: list[str] = []
    text = text.removeprefix(",").strip()
    while text:
        part, text = _split(text, ",")
        parts.append(part.strip())
        text = text.strip()
    return parts


def _split(text: str, end: str) -> tuple[str, str]:
    """What comes before and after the first `end` outside of brackets and quotes; all of it where there is none."""
    depth = 0
    for match in _SPECIAL.finditer(text):
        character = match[0]
        if not depth and character == end:
            return text[: match.start()], text[match.end() :]
        if character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
    return text, ""
