"""From the nodes' files to ``preflight.json``, ``good.txt``, ``bad.txt``, ``selected.txt`` and a table. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_port.core.config.schema import PreflightConfig
from megatron_port.core.dist.slurm import compress_hosts, same_host
from megatron_port.core.errors import EnvironmentFault
from megatron_port.core.io.typed_json import WrongContent, typed
from megatron_port.tools.preflight import files
from megatron_port.tools.preflight.node_file import NetworkFile, NodeFile, NodeSpace
from megatron_port.tools.preflight.verdict import Medians, NodeIssue, NodeVerdict, judge

NODE_KEYS = ("cpus", "core", "gpus", "device_counts", "expected_devices", "missing_devices", "unmeasured", "vendor",
             "memory", "disk", "shm", "versions", "environment")
"""Keys that a node's file must have to be judged."""
SHOWN_GOOD = 16
"""Good nodes that get a row of their own."""


@dataclass(frozen=True)
class Report:
    """Report of the verdicts on all nodes, in allocation order."""

    nodes: list[NodeVerdict]
    middle: Medians
    measured: Mapping[str, Mapping[str, Any]]
    """Node → contents of its file."""

    @property
    def good(self) -> list[str]:
        """Names of the good nodes."""
        return [n.node for n in self.nodes if n.good]

    @property
    def bad(self) -> list[str]:
        """Names of the bad nodes."""
        return [n.node for n in self.nodes if not n.good]


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts n10 after n9."""
    return [(int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"(\d+)", name)]


def read_nodes(folder: Path, hosts: Sequence[str], attempt: str) -> dict[str, Mapping[str, Any] | str]:
    """Contents of the nodes' files by host, in the order of ``hosts`` (empty: every file of this attempt, by name).

    A file of another attempt of the job, or one that cannot be read, stands for a node that did not answer.
    """
    found: dict[str, Mapping[str, Any] | str] = {}
    for path in sorted(folder.glob("node-*.json"), key=lambda p: natural(p.stem)):
        name = path.stem[len("node-"):]
        try:
            content = files.read_json(path)
        except EnvironmentFault as error:
            found[name] = str(error)
            continue
        lacking = [key for key in NODE_KEYS if key not in content]
        if content.get("attempt") == attempt:
            found[name] = f"{path.name} lacks {', '.join(lacking)}: it is another version's" if lacking else \
                _typed_node(content, path.name)
        elif hosts:
            found[name] = f"did not answer in this job ({attempt}); {path.name} is of job {content.get('attempt')}"
    if not hosts:
        return found
    out: dict[str, Mapping[str, Any] | str] = {}
    for host in hosts:
        own = next((n for n in found if n == host), None) or next((n for n in found if same_host(n, host)), None)
        out[host] = found[own] if own is not None else "did not answer: it wrote no file"
    return out


def _typed_node(content: Mapping[str, Any], name: str) -> Mapping[str, Any] | str:
    try:
        node = typed(NodeFile, content)
        for space in filter(None, (node.disk, node.shm)):
            typed(NodeSpace, space)
        return content
    except WrongContent as error:
        return f"{name} is not what a node writes: {error}"


def make_report(nodes: Mapping[str, Mapping[str, Any] | str], limits: PreflightConfig,
                network: Mapping[str, Any] | None = None, unfit: Mapping[str, str] | None = None) -> Report:
    """Judge all nodes; those that the network check blamed are bad too.

    Args:
        network: contents of network.json of the same attempt, if there is one.
        unfit: node → why the environment could not be staged there.
    """
    verdicts, middle = judge(nodes, limits)
    for verdict in verdicts:
        for what, bad, fix in (
            ("network", (network or {}).get("bad", {}), ""),
            ("staging", unfit or {}, "look at the node's own disk (cluster.local_disk)"),
        ):
            verdict.reasons += [NodeIssue(what, text, fix) for h, text in bad.items() if same_host(h, verdict.node)]
    return Report(verdicts, middle, {n: c for n, c in nodes.items() if not isinstance(c, str)})


def read_network(folder: Path, attempt: str) -> dict[str, Any] | None:
    """network.json, if it is there and of this attempt.

    Raises:
        EnvironmentFault: it is of this attempt, and not what the check of the network writes.
    """
    try:
        content = files.read_json(folder / files.NETWORK)
    except EnvironmentFault:
        return None
    if content.get("attempt") != attempt:
        return None
    try:
        typed(NetworkFile, content)
    except WrongContent as error:
        raise EnvironmentFault(f"{folder / files.NETWORK} is not what `preflight network` writes: {error}; run it "
                               "again") from None
    return content


def select(report: Report, number: int) -> list[str]:
    """The first ``number`` good nodes. Raises EnvironmentFault if there are fewer."""
    if len(report.good) < number:
        raise EnvironmentFault(
            f"{len(report.good)} of {len(report.nodes)} nodes are good, the run needs {number}; bad: "
            f"{compress_hosts(report.bad)}. Submit again with --exclude={compress_hosts(report.bad)}, "
            f"or with more spare nodes (launch.spare_nodes)"
        )
    return report.good[:number]


def write_report(folder: Path, report: Report, limits: PreflightConfig, attempt: str) -> None:
    """preflight.json and the two lists."""
    files.write_json(folder / files.REPORT, {
        "format": files.FORMAT, "attempt": attempt, "limits": asdict(limits), "medians": asdict(report.middle),
        "nodes": [n.as_json() for n in report.nodes], "good": report.good, "bad": report.bad,
    })
    files.write_hosts(folder / files.GOOD, report.good)
    files.write_hosts(folder / files.BAD, report.bad)


def render(report: Report) -> str:
    """The table: bad nodes first in their order, some of the good ones, then the notes with their nodes."""
    bad, good = ([n for n in report.nodes if n.good is wanted] for wanted in (False, True))
    width = max([len(n.node) for n in report.nodes] + [len("node")])
    lines = [f"{'node':<{width}}  verdict  measured or reason"]
    for n in bad:
        for i, reason in enumerate(n.reasons):
            lines.append(f"{n.node if i == 0 else '':<{width}}  {'bad' if i == 0 else '':<7}  {reason}")
    for n in good[:SHOWN_GOOD]:
        lines.append(f"{n.node:<{width}}  {'good':<7}  {_measured(report.measured[n.node])}")
    if len(good) > SHOWN_GOOD:
        lines.append(f"{'…':<{width}}  good     {len(good) - SHOWN_GOOD} more")
    notes: dict[str, list[str]] = {}
    for n in report.nodes:
        for note in n.notes:
            notes.setdefault(str(note), []).append(n.node)
    for text, hosts in notes.items():
        where = "all nodes" if len(hosts) == len(report.nodes) > 1 else compress_hosts(hosts)
        lines.append(f"note ({where}): {text}")
    lines.append(f"{len(good)} good, {len(bad)} bad" + (f": {compress_hosts(report.bad)}" if bad else ""))
    return "\n".join(lines)


def _measured(node: Mapping[str, Any]) -> str:
    gpus, core, disk = node["gpus"], node["core"], node["disk"]
    parts = [f"core {core['gflops']:.1f} GFLOP/s"]
    if gpus:
        rates = [g["tflops"] for g in gpus]
        free = min(g["memory_free"] for g in gpus)
        parts.insert(0, f"{len(gpus)} devices, {min(rates):.1f} to {max(rates):.1f} TFLOP/s, {free / 1e9:.1f} GB free")
    elif node["expected_devices"]:
        parts = [f"{max(node['device_counts'].values(), default=0)} devices", *parts]
    if disk:
        parts.append(f"disk {disk['free'] / 1e9:.0f} GB free")
    return ", ".join(parts)
