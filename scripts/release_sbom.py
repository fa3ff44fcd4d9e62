"""The bill of materials of a release in CycloneDX's JSON, from the constraints and the metadata of what is installed.

A few lines, since the tools that make one describe an environment (with its tests and linters): here the components are
what the wheel requires, directly or through others, at the versions that constraints/ pins.
"""

from __future__ import annotations

import importlib.metadata as metadata
import json
import re
import time
import uuid
from pathlib import Path
from typing import Any

NAMESPACE = uuid.UUID("6f0b8a52-6c37-4f0e-9a53-2f1f5f6e7b10")


def pinned(root: Path) -> dict[str, str]:
    """Name → version of every pin of constraints/common.txt and of the newest torch."""
    out: dict[str, str] = {}
    newest = sorted((root / "constraints").glob("torch-*.txt"))[-1]
    for path in (root / "constraints" / "common.txt", newest):
        for line in path.read_text().splitlines():
            found = re.match(r"([A-Za-z0-9._-]+)==([^\s;]+)", line)
            if found:
                out[_plain(found[1])] = found[2]
    return out


def _plain(name: str) -> str:
    """Return a project's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def required(name: str) -> list[str]:
    """Return the projects that an installed one requires here, without its extras; empty where it is not installed."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []
    needs = (Requirement(line) for line in lines)
    return sorted({_plain(r.name) for r in needs if r.marker is None or r.marker.evaluate({"extra": ""})})


def components(root: Path, direct: list[str]) -> tuple[list[dict[str, Any]], dict[str, list[str]]]:
    """Return the components and, by name, what each requires; those that are not installed here only if pinned."""
    pins, todo = pinned(root), sorted({_plain(name) for name in direct})
    depends: dict[str, list[str]] = {}
    while todo:
        name = todo.pop(0)
        if name in depends:
            continue
        depends[name] = required(name)
        todo += [n for n in depends[name] if n not in depends]
    out = []
    for name in sorted(depends):
        version = pins.get(name) or _installed(name)
        if version is None:
            depends = {k: [d for d in v if d != name] for k, v in depends.items() if k != name}
            continue
        component: dict[str, Any] = {
            "type": "library", "bom-ref": f"pkg:pypi/{name}@{version}", "name": name, "version": version,
            "purl": f"pkg:pypi/{name}@{version}",
        }
        licence = _licence(name)
        if licence:
            component["licenses"] = [{"license": {"name": licence}}]
        out.append(component)
    return out, depends


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _licence(name: str) -> str:
    try:
        about = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return ""
    fields = [str(about[name] or "") for name in ("License-Expression", "License")]  # None where there is none
    expression = (fields[0] or fields[1]).strip()
    return expression if expression and "\n" not in expression and len(expression) < 100 else ""


def write_sbom(root: Path, folder: Path, version: str, epoch: int) -> int:
    """Write ``megatron_port-VERSION.cdx.json`` into ``folder``; return the number of components."""
    try:
        import tomllib
    except ImportError:
        import tomli as tomllib  # type: ignore[no-redef]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    direct = [re.match(r"[A-Za-z0-9._-]+", line)[0] for line in project["dependencies"]]  # type: ignore[index]
    found, depends = components(root, direct)
    ref = {one["name"]: one["bom-ref"] for one in found}
    own = f"pkg:pypi/megatron-port@{version}"
    hashes = [{"alg": "SHA-256", "content": _sha256(path)} for path in sorted(folder.glob("*.whl"))]
    body = {
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        "serialNumber": f"urn:uuid:{uuid.uuid5(NAMESPACE, own)}",
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch)),
            "component": {"type": "application", "bom-ref": own, "name": "megatron_port", "version": version,
                          "purl": own, "hashes": hashes, "licenses": [{"license": {"id": "MIT"}}]},
        },
        "components": found,
        "dependencies": [
            {"ref": own, "dependsOn": sorted(ref[_plain(n)] for n in direct if _plain(n) in ref)},
            *({"ref": ref[name], "dependsOn": sorted(ref[n] for n in depends[name] if n in ref)}
              for name in sorted(ref)),
        ],
    }
    (folder / f"megatron_port-{version}.cdx.json").write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")
    return len(found)


def _sha256(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()
