"""Says to which layer a stored array belongs: by the scope that lowering writes around products, and near these.

A value and what made it come in, the name of a layer comes out. Products and convolutions carry the name of their layer
(`splitjax:layer:NAME`, in both directions); what lies between them belongs to the layer before it, and what is made of
a single argument, such as a gathered weight, to that argument.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from splitjax import _compat
from splitjax.cost.memory.program import Node

_SCOPE = re.compile(r"splitjax:(?:enter|product|stored|layer|convolve):([^/()]+)")
# So many operations are looked at on the way back from an array to a layer.
_FAR = 2000


class Layers:
    """Names the layers of values.

    **Arguments:** `makers`: by value the node that made it. `paths`: by argument its path. `names`: the names of
    layers, in which scopes have dots for slashes."""

    def __init__(self, makers: Mapping[int, Node], paths: Mapping[int, str], names: Sequence[str]) -> None:
        self._makers, self._paths = makers, paths
        self._names = {name.replace("/", "."): name for name in names}

    def of(self, value: int) -> str:
        """Returns the layer of a value, or the path of the argument that it is made of; "" where neither is near."""
        path, seen, waiting = "", {value}, [value]
        for _ in range(_FAR):
            if not waiting:
                break
            value = waiting.pop(0)
            maker = self._makers.get(value)
            if maker is None:
                path = path or self._paths.get(value, "")
                continue
            scopes: list[str] = _SCOPE.findall("/".join(_compat.name_stacks(maker.origin)))
            if scopes:
                return self._names.get(scopes[-1]) or scopes[-1].replace(".", "/")
            inputs = [*maker.inputs, *(value for region in maker.regions for value in region.outputs)]
            waiting += [each for each in inputs if each not in seen]
            seen.update(inputs)
        return path
