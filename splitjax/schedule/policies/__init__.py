"""Registers the policies, one a file. A module of this folder registers what it holds when it is imported, and
importing the folder imports them all."""

import importlib
import pkgutil

for _module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_module}")
