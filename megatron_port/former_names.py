"""Former names of modules that plugins import, so that plugins written for version 0.2 still load.

Each is the very module under its present name, with a DeprecationWarning that says that name.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGE = "megatron_port."
MOVED = {
    "backend.choose": "ext.kernels.choose", "backend.device": "run.device", "backend.fused": "core.layers.fused",
    "config.schema": "core.config.schema", "errors": "core.errors", "model.families.family": "ext.families.family",
    "model.families.fields": "ext.families.family", "optim.rules": "core.optim.rules",
    "parallel.collectives": "core.dist.collectives", "parallel.record": "core.dist.record",
    "pipeline.actions": "core.pipeline.schedules", "registry": "core.registry",
}
"""Former → present name, without the package."""
FOLDERS = {name.rpartition(".")[0] for name in MOVED} | {"model"} - {""}


class FormerNames(MetaPathFinder, Loader):
    """Finds the modules of ``MOVED``, and the folders that they were in."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of a former name; None for every other."""
        name = fullname.removeprefix(PACKAGE)
        if not fullname.startswith(PACKAGE) or name not in MOVED.keys() | FOLDERS:
            return None
        return ModuleSpec(fullname, self, is_package=name in FOLDERS)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module under its present name; None: an empty package."""
        name = spec.name.removeprefix(PACKAGE)
        if name not in MOVED:
            return None
        warnings.warn(f"{spec.name} is {PACKAGE}{MOVED[name]} now", DeprecationWarning, stacklevel=2)
        module = import_module(PACKAGE + MOVED[name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give a module its own specification back, which importlib has replaced."""
        if module.__spec__ is not None and module.__spec__.loader_state is not None:
            module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Let imports find the former names, once."""
    if not any(isinstance(finder, FormerNames) for finder in sys.meta_path):
        sys.meta_path.append(FormerNames())
