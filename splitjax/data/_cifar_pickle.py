"""Reads CIFAR-10's files for Python, which are pickles, without running anything that they ask for.

The bytes of a file go in, pixels and labels come out.

A pickle is a program; loading one from a stranger runs it. The official ones, written by Python 2 at protocol 2, need
four names from outside: those by which numpy stores an array, and `_codecs.encode`, by which Python 3 writes bytes at
that protocol. These names are given stand-ins that only take notes; every other name is refused, and numpy is not
called. Nor is Python's own reader, for what a few bytes can have it do without any name (`_Reader`).
"""

from __future__ import annotations

import io
import pickletools
from typing import Any

import numpy as np

from splitjax.errors import DataError

_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
_REMEDY = f"do not use this file: fetch the official archive, {_URL}"
_IMAGE_BYTES = 3 * 32 * 32


def read_pickle(contents: bytes, place: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads the pixels uint8[N, 3072], as planes, and labels int64[N] of a file of the Python version.

    **Arguments:**

    - `contents`: of the file.
    - `place`: what to call it in messages.

    Raises `DataError` for a pickle that refers to any other global than an array's, naming it, that is damaged or
    truncated (naming the byte where reading stopped), or that holds something else.
    """
    stream = io.BytesIO(contents)
    try:
        value = _Reader(stream, place).load()
    except DataError:
        raise
    except Exception as error:  # damaged bytes can mean any operation on any values
        raise DataError(
            f"a damaged or truncated pickle: {type(error).__name__}: {error}",
            place=f"{place}, byte offset {stream.tell()} of {len(contents)}",
            remedy=_REMEDY,
        ) from error
    rest = len(contents) - stream.tell()
    if rest:
        raise DataError(
            f"{rest} bytes follow the pickle's end", place=f"{place}, byte offset {stream.tell()}", remedy=_REMEDY
        )
    if not isinstance(value, dict):
        raise _not_cifar(f"a {type(value).__name__} in place of a dict", place)
    pixels, labels = (value.get(key.encode(), value.get(key)) for key in ("data", "labels"))
    pixels, labels = (entry.values() if isinstance(entry, _Array) else entry for entry in (pixels, labels))
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != _IMAGE_BYTES or not len(pixels):
        raise _not_cifar(f"the entry 'data' is no array uint8[N, {_IMAGE_BYTES}]", place)
    if isinstance(labels, np.ndarray):
        labels = labels.tolist()
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise _not_cifar("the entry 'labels' is no list of whole numbers", place)
    if len(labels) != len(pixels):
        raise _not_cifar(f"{len(pixels)} images and {len(labels)} labels", place)
    try:
        return pixels, np.array(labels, np.int64)
    except OverflowError as error:
        raise _not_cifar("a label above 64 bits", place) from error


def _not_cifar(reason: str, place: str) -> DataError:
    return DataError(f"not a file of CIFAR-10 for Python: {reason}", place=place, remedy=_REMEDY)


class _Dtype:
    """Stands for `numpy.dtype`: keeps the name, takes no other part of a dtype's state."""

    def __init__(self, name: Any, *_: Any):
        self.name = name.decode("ascii") if isinstance(name, bytes) else name

    def set_state(self, state: Any) -> None:
        """Takes no part of the `state`."""
        # byte order, fields, alignment: a dtype of one byte has none of them


class _Array:
    """Stands for an array under construction: `numpy.ndarray` with the state that a pickle gives it."""

    def __init__(self, *_: Any):
        self.state: Any = None

    def set_state(self, state: Any) -> None:
        """Takes the `state` that the pickle gives the array."""
        self.state = state

    def values(self) -> np.ndarray | None:
        """Returns the array, if its state is one of unsigned bytes, as many as its shape says; else None."""
        try:
            _, shape, dtype, is_fortran, contents = self.state
            if dtype.name not in ("u1", "|u1", "uint8") or not isinstance(shape, tuple) or len(shape) > 2:
                return None
            return np.frombuffer(contents, np.uint8).reshape(shape, order="F" if is_fortran else "C")
        except (TypeError, ValueError, AttributeError, OverflowError):
            return None


def _latin1(text: Any, encoding: Any = "latin1", *_: Any) -> bytes:
    """Stands for `_codecs.encode`: turns a text back into bytes, in the encodings of one byte a character."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", "iso-8859-1"):
        raise ValueError("bytes that are written as no text in latin1")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("_codecs", "encode"): _latin1,
}


_VALUES = frozenset(
    """INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 UNICODE
    BINUNICODE SHORT_BINUNICODE BINUNICODE8""".split()
)
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_PUTS, _GETS = frozenset(("PUT", "BINPUT", "LONG_BINPUT")), frozenset(("GET", "BINGET", "LONG_BINGET"))


class _Reader:
    """Evaluates the opcodes of a pickle that an array, numbers, texts, lists, tuples and dicts are written with; any
    other is an error.

    Python's own reader would also hash whatever stands as a key, and so follow tuples that hold each other twice
    through all of their 2**n ways, and would call what it is given: a hundred bytes could keep it for years.
    """

    def __init__(self, stream: io.BytesIO, place: str):
        self._stream, self._place = stream, place
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # what lay on the stack at each mark that is open
        self._notes: dict[int, Any] = {}

    def load(self) -> Any:
        """Returns the value of the pickle. Raises `DataError` for a name that is not allowed, and any other exception
        for what is damaged."""
        argument: Any  # of a kind that hangs on the opcode
        for count, (opcode, argument, _) in enumerate(pickletools.genops(self._stream)):
            name = opcode.name
            if name in _PUTS:
                if argument > count:
                    raise ValueError(f"note {argument} where there are at most {count}")
                self._notes[argument] = self._stack[-1]
            elif name == "MEMOIZE":
                self._notes[len(self._notes)] = self._stack[-1]
            elif name in _GETS:
                self._stack.append(self._notes[argument])
            elif name in _VALUES:
                self._stack.append(argument)
            elif name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name])
            elif name in ("STRING", "BINSTRING", "SHORT_BINSTRING"):  # Python 2's texts are bytes: the pixels are one
                self._stack.append(argument.encode("latin1"))
            elif name == "STOP":
                return self._stack.pop()
            else:
                self._evaluate(name, argument)

    def _evaluate(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name == "MARK":
            self._below.append(stack)
            self._stack = []
        elif name in ("EMPTY_DICT", "EMPTY_LIST"):
            stack.append({} if name == "EMPTY_DICT" else [])
        elif name in ("DICT", "LIST", "TUPLE"):
            items = self._to_mark()
            self._stack.append(_dict_of(items) if name == "DICT" else list(items) if name == "LIST" else tuple(items))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            size = int(name[-1])
            items = [stack.pop() for _ in range(size)]
            stack.append(tuple(reversed(items)))
        elif name in ("APPEND", "APPENDS"):
            items = [stack.pop()] if name == "APPEND" else self._to_mark()
            _top(self._stack, list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else self._to_mark()
            _top(self._stack, dict).update(_dict_of(items))
        elif name == "GLOBAL":
            stack.append(self._allowed(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(self._allowed(module, attribute))
        elif name == "REDUCE":
            arguments, called = stack.pop(), stack.pop()
            if not any(called is stand_in for stand_in in _ALLOWED.values()) or not isinstance(arguments, tuple):
                raise ValueError("a call of what is no name")
            stack.append(called(*arguments))
        elif name == "BUILD":
            state, made = stack.pop(), stack[-1]
            if not isinstance(made, _Array | _Dtype):
                raise ValueError("a state for what has none")
            made.set_state(state)
        elif name == "POP":
            stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"the opcode {name}, which no file of CIFAR-10 needs")

    def _to_mark(self) -> list[Any]:
        """Takes what lies above the last mark off the stack."""
        items, self._stack = self._stack, self._below.pop()
        return items

    def _allowed(self, module: Any, name: Any) -> Any:
        if isinstance(module, str) and isinstance(name, str) and (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        wanted = f"{str(module)[:100]}.{str(name)[:100]}" if isinstance(module, str) else "what is no name"
        raise DataError(
            f"a pickle that asks for {wanted}, which no file of CIFAR-10 needs; it was not run",
            value=wanted,
            place=f"{self._place}, byte offset {self._stream.tell()}",
            remedy=_REMEDY,
        )


def _top(stack: list[Any], kind: type) -> Any:
    """Returns the value on top of the `stack`, which has to be of this `kind`."""
    if type(stack[-1]) is not kind:
        raise ValueError(f"a {type(stack[-1]).__name__} in place of a {kind.__name__}")
    return stack[-1]


def _dict_of(items: list[Any]) -> dict[Any, Any]:
    """Makes a dict of keys and values in turn; keys are texts and numbers, which are quick to compare."""
    keys, values = items[::2], items[1::2]
    if len(keys) != len(values) or not all(isinstance(key, (str, bytes, int)) for key in keys):
        raise ValueError("keys that are no texts, or have no values")
    return dict(zip(keys, values))
