"""Packages that a provider may come from, where they are installed."""

from __future__ import annotations

import importlib
from typing import Any


def optional_import(name: str) -> tuple[Any | None, str]:
    """Return (module, "") or (None, why not). A package built for another torch may raise anything."""
    try:
        return importlib.import_module(name), ""
    except ModuleNotFoundError as error:
        return None, f"{error.name or name} is not installed"
    except Exception as error:
        return None, f"import {name} fails: {type(error).__name__}: {error}"
