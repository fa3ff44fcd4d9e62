"""Write which fields of config.json the installed transformers reads, family by family.

    python scripts/transformers_fields.py            # writes megatron_port/ext/families/transformers_fields.json
    python scripts/transformers_fields.py --check    # says whether the file is what this transformers gives

The sources are parsed, nothing is run. From a family's language model every class and function of transformers that it
names is followed, and so is its configuration's class. A field counts as read where any of them takes it from a
configuration: ``config.x``, ``getattr(config, "x")``, ``kwargs.pop("x")``. What a branch reads counts, taken or not.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from megatron_port.ext.families import family_named, family_names
from megatron_port.ext.families.family import FILE

FOLLOWED = ("models.", "masking_utils", "modeling_rope_utils", "modeling_layers", "cache_utils", "activations",
            "modeling_flash_attention_utils", "pytorch_utils", "integrations.moe", "integrations.sdpa_attention",
            "integrations.eager_paged", "modeling_utils", "heterogeneity")
"""Modules of transformers that take part in a forward pass. Sampling, losses, loading and quantization do not."""
WHOLE = {"PreTrainedModel", "PreTrainedConfig"}
"""Bases whose own bodies are read, and from which nothing is followed: they name all of transformers."""
OTHER_TASKS = ("SequenceClassification", "TokenClassification", "QuestionAnswering", "MTPCandidate")
CONFIGS = {"config", "text_config", "effective_config", "decoder_config", "layer_config", "cfg"}
"""Names by which these sources call a configuration."""
Node = ast.ClassDef | ast.FunctionDef | ast.Assign | ast.AnnAssign


@cache
def source(module: str) -> tuple[dict[str, Node], dict[str, tuple[str, str]]]:
    """Return a module's own top-level names, and (module, name) of those that it imports from transformers."""
    found = importlib.import_module(module)
    own: dict[str, Node] = {}
    imported = {}
    for node in ast.parse(inspect.getsource(found)).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            own[node.name] = node
        elif isinstance(node, ast.Assign):
            own |= {t.id: node for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own[node.target.id] = node
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            if getattr(found, "__file__", "").endswith("__init__.py") and node.level:
                base = module.split(".")[: len(module.split(".")) - node.level + 1]
            there = ".".join([*base, *([node.module] if node.module else [])])
            imported |= {a.asname or a.name: (there, a.name) for a in node.names}
    return own, {name: at for name, at in imported.items() if at[0].startswith("transformers")}


def reachable(module: str, name: str) -> list[Node]:
    """Return what is defined in transformers and named from ``name`` on, itself included."""
    todo, seen, out = [(module, name)], set(), []
    while todo:
        at = todo.pop()
        inside = at[0].removeprefix("transformers.").startswith(FOLLOWED)
        if at in seen or not inside or (at[0].endswith("modeling_utils") and at[1] not in WHOLE):
            continue
        seen.add(at)
        own, imported = source(at[0])
        if at[1] not in own:
            if at[1] in imported:
                todo.append(imported[at[1]])
            continue
        out.append(own[at[1]])
        if at[1] in WHOLE:
            continue
        for used in names_in(own[at[1]]):
            if used in own and not used.endswith(OTHER_TASKS):
                todo.append((at[0], used))
            elif used in imported:
                todo.append(imported[used])
    return out


@cache
def names_in(node: ast.AST) -> set[str]:
    """Return the names that a definition uses."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def is_config(node: ast.expr) -> bool:
    """Whether an expression is a configuration."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr == "get_text_config"
    return (isinstance(node, ast.Name) and node.id in CONFIGS) or (
        isinstance(node, ast.Attribute) and node.attr in CONFIGS
    )


@cache
def reads(node: ast.AST, *, of_self: bool = False) -> set[str]:
    """Return the fields that a definition takes from a configuration; ``of_self``: it is one itself."""
    out: set[str] = set()

    def config(at: ast.expr) -> bool:
        return is_config(at) or (of_self and isinstance(at, ast.Name) and at.id in ("self", "owner_self"))

    for n in ast.walk(node):
        if isinstance(n, ast.Attribute) and config(n.value):
            out.add(n.attr)
        if not isinstance(n, ast.Call) or not n.args:
            continue
        name = n.args[min(1, len(n.args) - 1)]
        if isinstance(n.func, ast.Name) and n.func.id in ("getattr", "hasattr") and config(n.args[0]):
            out |= {str(name.value)} if isinstance(name, ast.Constant) else set()
        kwargs = isinstance(n.func, ast.Attribute) and ast.unparse(n.func.value) == "kwargs"
        if of_self and kwargs and isinstance(n.args[0], ast.Constant):
            out.add(str(n.args[0].value))
    for function in (n for n in ast.walk(node) if isinstance(n, ast.FunctionDef)):
        if any(computed(n, config) for n in ast.walk(function)):  # any text in it may be the name
            texts = {str(t.value) for t in ast.walk(function) if isinstance(t, ast.Constant)}
            out |= {t for t in texts if t.isidentifier() and len(t) > 3 and t not in ("True", "False", "None")}
    return out


def computed(node: ast.AST, config: Callable[[ast.expr], bool]) -> bool:
    """Whether this takes a field whose name is computed."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or len(node.args) < 2:
        return False
    asked = node.func.id in ("getattr", "hasattr") and config(node.args[0])
    return asked and not isinstance(node.args[1], ast.Constant)


@cache
def keys(node: ast.AST) -> set[str]:
    """Return the keys of rope tables that a definition takes."""
    out = set()
    for n in ast.walk(node):
        table = n.value if isinstance(n, ast.Subscript) else n.func.value if (
            isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in ("get", "setdefault")
        ) else None
        key = n.slice if isinstance(n, ast.Subscript) else n.args[0] if isinstance(n, ast.Call) and n.args else None
        if table is not None and "rope_parameters" in ast.unparse(table) and isinstance(key, ast.Constant):
            out.add(str(key.value))
    return out


def config_nodes(kind: type) -> list[ast.AST]:
    """Return the definitions of a configuration's class and of those below it, up to object."""
    out: list[ast.AST] = []
    for base in kind.__mro__:
        if base.__module__.startswith("transformers") and base.__name__ != "PushToHubMixin":
            node = source(base.__module__)[0].get(base.__name__)
            out += [node] if node is not None else []
    return out


def plain(value: Any) -> bool:
    """Whether a default can be written down."""
    return isinstance(value, bool | int | float | str)


def fields_of(family: str, transformers: Any) -> dict[str, Any]:
    """Return the fields of one family: those that are read, their other names, and transformers' defaults."""
    kind = transformers.CONFIG_MAPPING[family]
    module = transformers.AutoModelForCausalLM._model_mapping[kind].__module__
    model = reachable(module, family_named(family).architecture)
    classes = config_nodes(kind)
    read = set().union(*(reads(n) for n in model), *(reads(n, of_self=True) for n in classes))
    methods = {name for name in dir(kind) if callable(getattr(kind, name, None)) or name.startswith("__")}
    defaults = {f.name: f.default for f in kind.__dataclass_fields__.values() if plain(f.default)}
    return {
        "read": sorted(read - methods), "aliases": dict(sorted(kind.attribute_map.items())),
        "defaults": dict(sorted(defaults.items())), "rope": sorted(set().union(*(keys(n) for n in model))),
    }


def derived() -> dict[str, Any]:
    """Return what the installed transformers reads."""
    import transformers

    found = {name: fields_of(name, transformers) for name in family_names()}
    everywhere = sorted(set.intersection(*(set(f["read"]) for f in found.values())))
    for fields in found.values():
        fields["read"] = [name for name in fields["read"] if name not in everywhere]
    return {"transformers": transformers.__version__, "read": everywhere, "families": found}


def text_of(table: dict[str, Any]) -> str:
    """Return the file's text, a line for each list."""
    lines = []
    for name, fields in table["families"].items():
        inside = ",\n".join(f"   {json.dumps(key)}: {json.dumps(value)}" for key, value in fields.items())
        lines.append(f"  {json.dumps(name)}: {{\n{inside}\n  }}")
    head = f' "transformers": {json.dumps(table["transformers"])},\n "read": {json.dumps(table["read"])}'
    return "{\n" + head + ',\n "families": {\n' + ",\n".join(lines) + "\n }\n}\n"


def main(argv: list[str] | None = None) -> int:
    """Write the file, or with ``--check`` compare it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the file is another")
    args = parser.parse_args(argv)
    text, path = text_of(derived()), Path(FILE)
    if not args.check:
        path.write_text(text)
        return 0
    same = path.read_text() == text
    sys.stdout.write(f"{path}: {'as derived' if same else 'another than derived; run without --check'}\n")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
