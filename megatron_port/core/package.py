"""Where the package and what ships with it are, in a checkout and in a wheel; versions of installed packages."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1]
ROOT = FOLDER.parent
"""What ``sys.path`` needs for ``import megatron_port``; the repository of a checkout."""


def shipped_folder(name: str) -> Path:
    """Return the folder ``configs`` or ``launch``: inside a wheel's package as ``_configs``, beside a checkout's."""
    inside = FOLDER / f"_{name}"
    return (inside if inside.is_dir() else ROOT / name).resolve()


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of those of the packages that are installed. None is imported."""
    from importlib.metadata import PackageNotFoundError, version  # 16 ms, which no command spends that asks for none

    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
