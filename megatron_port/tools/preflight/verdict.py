"""Which nodes are fit for the run: each against the thresholds, and against the other nodes.

The comparison is with the *upper median* over all nodes (of an even number, the better of the two
in the middle), so that it stands for a healthy node as long as no more than half are sick.
A *reason* takes a node out of the run, a *note* does not.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_port.core.config.schema import PreflightConfig
from megatron_port.core.errors import EnvironmentFault
from megatron_port.core.io.typed_json import WrongContent, typed
from megatron_port.run.launchers import compress_hosts, same_host
from megatron_port.tools.preflight import node_file as files
from megatron_port.tools.preflight.node_file import NetworkFile, NodeFile, NodeSpace

SMALL_SHM = 64 << 20
HOT_C = 95.0
HELD = 0.2
"""Stopped time / (stopped + CPU time) by which a node may exceed the others. 0.00 on free nodes and on busy ones;
a quota of a quarter shows as 0.75 on a free node and, for it binds less, as 0.4 on one with four times as many busy
processes as CPUs."""
BINDING = ("python", "torch", "megatron_port", "cuda", "rocm")
"""Versions that must be one over the run; the others (driver, kernel) are only noted."""


@dataclass(frozen=True)
class NodeIssue:
    """One thing that is wrong, with the numbers and what to do."""

    what: str
    """Short name of the check, e.g. ``core`` or ``device 3``."""
    text: str
    fix: str
    measured: float | None = None
    expected: float | None = None

    def __str__(self) -> str:
        return f"{self.what}: {self.text}; {self.fix}" if self.fix else f"{self.what}: {self.text}"


@dataclass
class NodeVerdict:
    """Judgement of one node."""

    node: str
    reasons: list[NodeIssue] = field(default_factory=list)
    notes: list[NodeIssue] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether the node has nothing but notes."""
        return not self.reasons

    def as_json(self) -> dict[str, Any]:
        """Return the verdict for preflight.json."""
        return {"good": self.good, **asdict(self)}


@dataclass(frozen=True)
class Medians:
    """Upper medians over the nodes that answered; 0: nobody has a value."""

    cpus: float = 0.0
    core_gflops: float = 0.0
    cpu_gflops: float = 0.0
    stopped: float = 0.0
    gpu_tflops: float = 0.0
    gpu_free: float = 0.0
    memory: float = 0.0


def upper_median(values: Iterable[float]) -> float:
    """Return the upper median; 0 of nothing."""
    found = sorted(values)
    return statistics.median_high(found) if found else 0.0


def medians(nodes: Iterable[Mapping[str, Any]]) -> Medians:
    """Return the medians over the contents of the nodes' files."""
    found = list(nodes)
    gpus = [g for n in found for g in n["gpus"]]
    return Medians(
        cpus=upper_median(n["cpus"] for n in found),
        core_gflops=upper_median(n["core"]["gflops"] for n in found if n["core"]["conclusive"]),
        cpu_gflops=upper_median(n["core"]["cpu_gflops"] for n in found),
        stopped=statistics.median_low([n["core"]["stopped"] for n in found]) if found else 0.0,
        gpu_tflops=upper_median(g["tflops"] for g in gpus if g["tflops"]),
        gpu_free=upper_median(g["memory_free"] for g in gpus if g["memory_total"]),
        memory=upper_median(n["memory"]["total"] for n in found),
    )


def judge(nodes: Mapping[str, Mapping[str, Any] | str], limits: PreflightConfig) -> tuple[list[NodeVerdict], Medians]:
    """Return a verdict for every node, in the order given.

    Args:
        nodes: name → contents of its file, or why there are none.
    """
    answers = {name: n for name, n in nodes.items() if not isinstance(n, str)}
    middle = medians(answers.values())
    majority = common_versions([n["versions"] for n in answers.values()])
    out = []
    for name, node in nodes.items():
        verdict = NodeVerdict(name)
        if isinstance(node, str):
            fix = "look at this node's lines in the job's log, and drain it"
            verdict.reasons.append(NodeIssue("answer", node, fix))
        else:
            verdict.reasons += _device_count(node)
            verdict.reasons += _core(node, limits, middle)
            for gpu in node["gpus"]:
                verdict.reasons += _gpu(gpu, limits, middle)
            verdict.reasons += _space(node, limits, middle)
            for device in node["vendor"]["devices"]:
                _vendor_device(device, verdict)
            _versions(node["versions"], majority, verdict)
            verdict.notes += _notes(node, limits)
        out.append(verdict)
    return out, middle


def _below(what: str, value: float, absolute: float, middle: float, limits: PreflightConfig, unit: str,
           fix: str, scale: float = 1.0) -> list[NodeIssue]:
    """Return an issue if ``value`` is under the threshold, or under its share of the median."""
    wanted = max(absolute, limits.share_of_median * middle)
    if value >= wanted:
        return []
    against = "the threshold"
    if wanted > absolute:
        against = f"{limits.share_of_median:.0%} of the median {middle / scale:.4g}"
    return [NodeIssue(what, f"{value / scale:.4g} {unit}, at least {wanted / scale:.4g} expected ({against})", fix,
                    value / scale, wanted / scale)]


def _device_count(node: Mapping[str, Any]) -> list[NodeIssue]:
    expected, fault = node["expected_devices"], node["vendor"]["fault"]
    counts = ", ".join(f"{source} {n}" for source, n in node["device_counts"].items())
    found = [
        NodeIssue("devices", f"{problem} (counted: {counts or 'none'})",
                "drain the node; a lost device needs a reboot or a repair (dmesg says why)", None, expected)
        for problem in node["missing_devices"]
    ]
    return found + [NodeIssue("devices", fault, "drain the node; the driver does not answer")] * bool(fault)


def _core(node: Mapping[str, Any], limits: PreflightConfig, middle: Medians) -> list[NodeIssue]:
    core, few = node["core"], _below(
        "cpus", node["cpus"], 0.0, middle.cpus, limits, "CPUs may be used",
        "look at the affinity and the CPU quota of the job's control group (cpu.max or cpu.cfs_quota_us)")
    absolute = 0.0 if node["gpus"] else limits.matmul_tflops * 1e3
    if core["stopped"] - middle.stopped > HELD:
        return [*few, NodeIssue(
            "core", f"a CPU quota or a stop signal held the process for {core['stopped']:.0%} of its time (the other "
            f"nodes: {middle.stopped:.0%}), {core['gflops']:.4g} GFLOP/s are left",
            "lift the quota of the job's control group on this node (cpu.max or cpu.cfs_quota_us)",
            core["gflops"], limits.share_of_median * middle.core_gflops,
        )]
    if core["conclusive"]:
        fix = "look for a power cap or a low clock (cpupower frequency-info)"
        if core["share"] < limits.share_of_median:
            fix = (f"it was on the CPU for {core['share']:.0%} of the time while CPUs were idle: look for a CPU quota, "
                   "and for left-over processes (ps -eo pcpu,user,args --sort=-pcpu)")
        slow = _below("core", core["gflops"], absolute, middle.core_gflops, limits, "GFLOP/s (fp32, one core)", fix)
        if slow:
            return few + slow
    # Per CPU second the rate is the core's own, even on a node that was never free.
    return few + _below("core", core["cpu_gflops"], absolute, middle.cpu_gflops, limits, "GFLOP per CPU second (fp32)",
                        "look for a power cap or a low clock (cpupower frequency-info)")


def _gpu(gpu: Mapping[str, Any], limits: PreflightConfig, middle: Medians) -> list[NodeIssue]:
    what = f"device {gpu['index']}"
    if gpu["fault"]:
        return [NodeIssue(what, gpu["fault"], "drain the node; reset or replace the device")]
    return [
        *_below(what, gpu["tflops"], limits.matmul_tflops, middle.gpu_tflops, limits, "TFLOP/s (bf16)",
                "look at its clock, power cap and temperature below; drain the node if a reset does not help"),
        *_below(what, gpu["memory_free"], limits.free_memory_gb * 1e9, middle.gpu_free, limits, "GB of memory free",
                "a process of an earlier job holds the rest: end it, or drain the node", 1e9),
    ]


def _space(node: Mapping[str, Any], limits: PreflightConfig, middle: Medians) -> list[NodeIssue]:
    disk = node["disk"]
    found = _below("memory", node["memory"]["total"], 0.0, middle.memory, limits, "GB on the host",
                   "a memory module is missing: drain the node", 1e9)
    if disk:
        found += _below("disk", disk["free"], limits.free_disk_gb * 1e9, 0.0, limits, f"GB free on {disk['path']}",
                        "remove what earlier jobs left there, or lower preflight.free_disk_gb", 1e9)
    return found


def _vendor_device(device: Mapping[str, Any], verdict: NodeVerdict) -> None:
    what = f"device {device['index']}"
    errors, heat = device.get("ecc_uncorrected") or 0, device.get("temperature_c") or 0.0
    if errors:
        verdict.reasons.append(NodeIssue(
            what, f"{errors} uncorrected memory errors", "reset the device, or drain the node", errors, 0))
    if device.get("needs_reset"):
        verdict.reasons.append(NodeIssue(what, device["needs_reset"], "reset the device, or drain the node"))
    if device.get("throttling"):
        now, most = device.get("clock_mhz"), device.get("max_clock_mhz")
        clock = f" at {now:.0f} of {most:.0f} MHz" if now and most else ""
        verdict.reasons.append(NodeIssue(what, f"throttled: {', '.join(device['throttling'])}{clock}",
                                       "look at cooling and power of the node; drain it"))
    if device.get("ecc_corrected"):
        verdict.notes.append(NodeIssue(what, f"{device['ecc_corrected']} corrected memory errors", ""))
    if heat >= HOT_C:
        verdict.notes.append(NodeIssue(what, f"{heat:.0f} C", "look at the cooling of the node", heat, HOT_C))


def common_versions(versions: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the version of each package that more than half of the nodes have, where there is such a majority."""
    out = {}
    for name in dict.fromkeys(n for v in versions for n in v):
        (value, count), *_ = Counter(v.get(name, "none") for v in versions).most_common(1)
        if 2 * count > len(versions):
            out[name] = value
    return out


def _versions(found: Mapping[str, str], majority: Mapping[str, str], verdict: NodeVerdict) -> None:
    for name, value in majority.items():
        own = found.get(name, "none")
        if own == value:
            continue
        fix = "ranks of different versions refuse to start: let all nodes use one environment"
        if name in BINDING:
            verdict.reasons.append(NodeIssue("versions", f"{name} {own}, most nodes have {value}", fix))
        else:
            verdict.notes.append(NodeIssue("versions", f"{name} {own}, most nodes have {value}", ""))


def _notes(node: Mapping[str, Any], limits: PreflightConfig) -> list[NodeIssue]:
    found = []
    if not node["core"]["conclusive"]:
        found.append(NodeIssue(
            "core", f"other processes kept all CPUs busy for {node['core']['seconds']:.0f} s, so that its "
            f"{node['core']['gflops']:.4g} GFLOP/s were not judged",
            "look for left-over processes (ps -eo pcpu,user,args --sort=-pcpu)"))
    if node["unmeasured"]:
        found.append(NodeIssue("devices", node["unmeasured"], ""))
    shm = node["shm"]
    if shm and shm["free"] < SMALL_SHM:
        found.append(NodeIssue("/dev/shm", f"{shm['free'] / 1e6:.0f} MB free",
                               "NCCL and RCCL want more; in a container: --shm-size=8g or --ipc=host"))
    missing, different = node["environment"]["missing"], node["environment"]["different"]
    found += [NodeIssue("environment", f"{name} is not set, the run asks for {name}={value}",
                      f"export {name}='{value}' ahead of srun, and let srun pass it on (--export=ALL)")
              for name, value in missing.items()]
    found += [NodeIssue("environment", f"{name} is '{own}', the run asks for '{value}'", "")
              for name, (value, own) in different.items()]
    return found


# From the nodes' files to ``preflight.json``, ``good.txt``, ``bad.txt``, ``selected.txt`` and a table. No torch.

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
