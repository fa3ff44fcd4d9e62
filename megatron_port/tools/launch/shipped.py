"""The job scripts that come with the program, ``launch/*.sh`` and ``launch/sites/*.sh``, made from ``configs/``."""

from __future__ import annotations

from pathlib import Path

from megatron_port.core.config.loader import load
from megatron_port.core.io.files import write_output
from megatron_port.core.package import shipped_folder
from megatron_port.tools.launch.script import Order, render_shipped, site_block

RUNS = {run.replace("-", "_"): run for run in (
    "frontier-22b", "frontier-175b", "frontier-1t", "frontier-1t-tp4", "lumi-22b", "lumi-175b", "perlmutter-22b",
    "perlmutter-175b", "frontier-22b-zero3", "frontier-175b-16nodes", "qwen3-30b-frontier", "gpt-1t-32k-frontier",
)}
"""Script → run file under ``configs/runs``."""

_MADE = "Made by `megatron-port launch sites` from {}; edit that."
_USE = "sbatch [options] launch/{}.sh [--set a.b=value …]; options of sbatch win over the lines below."
_ANY = (
    "Any cluster with SLURM: one process per task, as many nodes and tasks as sbatch is asked for.",
    "sbatch -N 4 --ntasks-per-node=8 --gpus-per-node=8 launch/slurm.sh run.toml [--set a.b=value …]",
)


def launch_folder() -> Path:
    """Return the folder with ``common.sh``: the package's ``_launch``, in a checkout a link to ``launch/``."""
    return shipped_folder("launch")


def site_names() -> list[str]:
    """Return the clusters that have a file."""
    return sorted({p.stem for p in shipped_folder("configs").glob("clusters/*.toml")})


def shipped_scripts() -> dict[str, str]:
    """Return every generated file by its path in :func:`launch_folder`."""
    out = {}
    for name in site_names():
        source = f"clusters/{name}"
        note = f"# shellcheck shell=bash disable=SC2034,SC2154\n# {_MADE.format(f'configs/{source}.toml')}\n"
        out[f"sites/{name}.sh"] = note + site_block(load(source).config.cluster)
    out["slurm.sh"] = render_shipped(Order(run=""), site="slurm", head=[*_ANY, _MADE.format("configs/clusters")])
    for script, run in RUNS.items():
        source = f"runs/{run}"
        config = load(source).config
        head = [_USE.format(script), _MADE.format(f"configs/{source}.toml")]
        order = Order(run=source)
        out[f"{script}.sh"] = render_shipped(order, site=config.cluster.name, head=head, config=config)
    return out


def stale_scripts() -> list[str]:
    """Return the generated files that are missing, out of date, or of no cluster any more."""
    folder, wanted = launch_folder(), shipped_scripts()
    out = [name for name, text in wanted.items() if not _holds(folder / name, text)]
    return out + [f"sites/{p.name}" for p in sorted(folder.glob("sites/*.sh")) if f"sites/{p.name}" not in wanted]


def write_shipped() -> list[str]:
    """Bring the generated files up to date; return the names of those that changed. Raises EnvironmentFault."""
    folder, wanted, stale = launch_folder(), shipped_scripts(), stale_scripts()
    for name in stale:
        if name in wanted:
            write_output(folder / name, wanted[name], mode=0o644 if name.startswith("sites/") else 0o755)
        else:
            (folder / name).unlink()
    return stale


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode()
