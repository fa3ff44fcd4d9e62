"""What a job script has to know of a cluster, as assignments of bash.

``launch/common.sh`` reads them; its head lists the names. ``site_setup`` runs first in the job,
when the job's id and the user are known: all that holds a placeholder is set there.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_port.core.config.schema import ClusterConfig
from megatron_port.tools.launch.quote import PLACEHOLDERS, shell_fill, shell_quote


def assignment(name: str, value: str, field: str) -> str:
    """Return ``name=value``."""
    return f"{name}={shell_quote(value, field)}"


def array(name: str, values: Sequence[str], field: str) -> str:
    """Return ``name=(a b c)``, with one element per line where the line would be long."""
    words = [shell_quote(v, field) for v in values]
    line = f"{name}=({' '.join(words)})"
    return line if len(line) <= 110 else f"{name}=(\n" + "".join(f"  {w}\n" for w in words) + ")"


def exports(entries: Sequence[str], field: str) -> list[str]:
    """Return ``export NAME=value`` for every NAME=value; placeholders become variables."""
    out = []
    for entry in entries:
        name, _, value = entry.partition("=")
        out.append(f"export {name}={shell_fill(value, f'{field} {name}')}")
    return out


def function(name: str, body: Sequence[str]) -> str:
    """Return a bash function; an empty one does nothing."""
    return f"{name}() {{\n" + "".join(f"  {line}\n" for line in body or [":"]) + "}"


def _container(cluster: ClusterConfig) -> list[str]:
    """Return what is said of the container, where the ranks run in one."""
    if not cluster.container:
        return []
    return [
        assignment("site_container", cluster.container, "cluster.container"),
        assignment("site_image", cluster.container_image, "cluster.container_image"),
        assignment("site_container_python", cluster.container_python, "cluster.container_python"),
        array("site_container_options", cluster.container_options, "cluster.container_options"),
    ]


def site_block(cluster: ClusterConfig) -> str:
    """Return the site part of a job script.

    Raises:
        ConfigError: a value that cannot be said in a script.
    """
    disk = {name: word for name, word in PLACEHOLDERS.items() if name != "local_disk"}
    setup = [f"site_local_disk={shell_fill(cluster.local_disk, 'cluster.local_disk', disk)}"]
    if cluster.modules:
        setup.append("load_modules " + " ".join(shell_quote(m, "cluster.modules") for m in cluster.modules))
    setup += exports(cluster.environment, "cluster.environment")
    if cluster.container:
        mounts = [shell_fill(m, "cluster.container_mounts") for m in cluster.container_mounts]
        setup.append(f"site_mounts=({' '.join(mounts)})")
    return "\n".join([
        assignment("site_name", cluster.name, "cluster.name"),
        assignment("site_interface", cluster.interface, "cluster.interface"),
        f"site_cores_per_task={cluster.cores_per_task}",
        array("site_srun", cluster.srun_options, "cluster.srun_options"),
        *_container(cluster),
        function("site_setup", setup),
    ]) + "\n"
