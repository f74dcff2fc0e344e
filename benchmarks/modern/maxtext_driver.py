"""Compiles MaxText's own training step, for `python -m benchmarks modern --only large --maxtext-python PATH`.

    PYTHON -P benchmarks/modern/maxtext_driver.py REQUEST.json FOLDER

This file is run by a Python that has the package `maxtext`, and needs nothing besides it and JAX. REQUEST.json holds
the `arguments` that MaxText's `train_compile` is given, and the names of `settings` that are told back. FOLDER gets
`answer.json`, with versions, settings and memory, and `module.hlo`, the compiled module as a serialised
`HloModuleProto`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import sys
from typing import Any

PACKAGES = ("maxtext", "jax", "jaxlib", "libtpu", "flax", "optax")
MEMORY = ("argument", "temp", "output", "alias")


def main(request: pathlib.Path, folder: pathlib.Path) -> int:
    """Compiles what `request` asks for, and writes what became of it into `folder`."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs; the TPU's compiler is asked for by the topology
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train_compile

    asked = json.loads(request.read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    compile_step = train_compile.jit_and_compile

    def kept(*arguments: Any) -> Any:
        """Compiles as MaxText does, and keeps the program and what it was made of."""
        found["config"], found["state"] = arguments[8], arguments[1][0]
        found["program"] = compile_step(*arguments)
        return found["program"]

    train_compile.jit_and_compile = kept
    base = pathlib.Path(pyconfig.__file__).with_name("base.yml")
    train_compile.main(["train_compile", str(base), *asked["arguments"]])
    program, memory = found["program"], found["program"].memory_analysis()
    answer = {
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "settings": {name: _plain(getattr(found["config"], name)) for name in asked["settings"]},
        "parameters": _num_parameters(found["state"]),
        **{name: int(getattr(memory, f"{name}_size_in_bytes")) for name in MEMORY},
        "peak": int(getattr(memory, "peak_memory_in_bytes", 0)),
    }
    (module,) = program.runtime_executable().hlo_modules()
    (folder / "module.hlo").write_bytes(module.as_serialized_hlo_module_proto())
    (folder / "answer.json").write_text(json.dumps(answer), encoding="utf-8")
    return 0


def _plain(value: Any) -> Any:
    """A setting as JSON has it; what JSON does not have is told by its text."""
    value = getattr(value, "value", value)
    return value if isinstance(value, (bool, int, float, str)) else str(value)


def _num_parameters(state: Any) -> int:
    """The number of parameters of a state of training, whose model lies under `model`."""
    import jax
    from flax import nnx

    return sum(leaf.size for leaf in jax.tree.leaves(nnx.filter_state(state["model"], nnx.Param)))


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])))
