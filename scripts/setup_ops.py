"""Is every DeepSpeed op that was asked for in the wheel, for the right device? Standard library only (setup.py)."""

from __future__ import annotations

import re
import struct
from typing import Any

OPS = ("CPU_ADAM", "FUSED_ADAM")


def ops_for(device: str) -> tuple[str, ...]:
    """What is built for a device: on a CPU only the optimizer that runs there; half of the compilation is the other."""
    return ("CPU_ADAM",) if device == "cpu" else OPS


# Those with GPU code in them, on a GPU.
DEVICE_OPS = ("FUSED_ADAM",)
# kind, version, head size, size, compressed size, options, minor, major, architecture; more of the head follows.
FATBIN_ENTRY = struct.Struct("<HHIQIIHHI")
FATBIN_MAGIC, FATBIN_ELF = struct.pack("<I", 0xBA55ED50), 2

# What the installed DeepSpeed holds, as JSON: every op that was asked for is loaded with the compiler locked out, and
# CPUAdam takes one step beside torch's AdamW. It reports; op_problems() judges.
PROBE_OPS = """
import json, sys
import torch
from deepspeed import git_version_info as built
from deepspeed.ops.op_builder.all_ops import ALL_OPS
from deepspeed.ops.op_builder.builder import OpBuilder
def refuse(self, *args, **kwargs):
    raise RuntimeError("it would be compiled when it is used")
OpBuilder.jit_load = refuse
by_switch = {getattr(op, "BUILD_VAR", ""): op for op in ALL_OPS.values()}
answer = {"built_for": built.accelerator_name, "torch": built.torch_info, "ops": {}, "adam": None}
for op in sys.argv[2:]:
    builder = by_switch.get("DS_BUILD_" + op)
    found = {"name": op.lower(), "installed": False, "file": "", "error": "this DeepSpeed has no such op here"}
    if builder is not None:
        found.update(name=builder.name, installed=bool(built.installed_ops.get(builder.name)), error="")
        try:
            found["file"] = str(builder.load().__file__)
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"
    answer["ops"][op] = found
if answer["ops"].get("CPU_ADAM", {}).get("file"):
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    torch.manual_seed(0)
    start, gradient = torch.randn(1000), torch.randn(1000)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    ours.grad, theirs.grad = gradient.clone(), gradient.clone()
    DeepSpeedCPUAdam([ours], lr=1e-2, weight_decay=0.1, adamw_mode=True).step()
    torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1).step()
    answer["adam"] = (ours - theirs).abs().max().item()
open(sys.argv[1], "w").write(json.dumps(answer))
"""


def wanted_binaries(device: str, environment: dict[str, str]) -> set[str]:
    """Targets that the device code of an op was asked to be built for: sm_80, …, or gfx90a, …; none on a CPU."""
    if device == "cuda":
        names = environment.get("TORCH_CUDA_ARCH_LIST", "").replace(" ", ";").split(";")
        return {"sm_" + name.split("+")[0].replace(".", "") for name in names if name}
    if device == "rocm":
        return {name.split(":")[0] for name in re.split(r"[;, ]+", environment.get("PYTORCH_ROCM_ARCH", "")) if name}
    return set()


def found_binaries(device: str, data: bytes) -> set[str]:
    """Targets that a built op's file holds machine code for."""
    if device == "rocm":
        # The names of the bundles in a HIP fat binary are plain text: hipv4-amdgcn-amd-amdhsa--gfx90a.
        return {name.decode() for name in re.findall(rb"amdgcn-amd-amdhsa--(gfx[0-9a-f]+)", data)}
    # A CUDA fat binary: a head (magic, version, head size, size), then entries with heads of their own.
    found: set[str] = set()
    at = data.find(FATBIN_MAGIC)
    while device == "cuda" and 0 <= at <= len(data) - 16:
        _, _, head, size = struct.unpack_from("<IHHQ", data, at)
        entry, end = at + head, min(at + head + size, len(data) - FATBIN_ENTRY.size)
        while entry <= end:
            kind, _, length, bytes_, _, _, _, _, arch = FATBIN_ENTRY.unpack_from(data, entry)
            if kind == FATBIN_ELF:
                found.add(f"sm_{arch}")
            entry += max(length + bytes_, FATBIN_ENTRY.size)
        at = data.find(FATBIN_MAGIC, at + 4)
    return found


def op_problems(
    device: str, facts: dict[str, Any], wanted: set[str], found: dict[str, set[str]], log: str
) -> list[str]:
    """What is wrong with the ops that were asked for; each names the op, the log and what to do.

    Args:
        facts: what PROBE_OPS wrote.
        wanted: targets of device code, from :func:`wanted_binaries`.
        found: op → targets in its file, from :func:`found_binaries`; ops without GPU code are not in it.
        log: of the build.
    """
    accelerator = "cpu" if device == "cpu" else "cuda"
    problems = []
    if facts["built_for"] != accelerator:
        problems.append(f"the wheel is built for {facts['built_for'] or 'no accelerator'}, and DEVICE={device} needs "
                        f"{accelerator}; it is removed, make setup DEVICE={device} again")
    version = {"cuda": "cuda_version", "rocm": "hip_version"}.get(device)
    if version and facts["torch"].get(version, "0.0") == "0.0":
        problems.append(f"the wheel was built with a torch that has no {version.split('_')[0].upper()}: remove .venv "
                        f"and .cache/wheels, and make setup DEVICE={device} again with TORCH_INDEX")
    for op, fact in facts["ops"].items():
        name = fact["name"]
        if not fact["installed"]:
            problems.append(f"{name} was asked for (DS_BUILD_{op}=1) and left out: DeepSpeed found this machine "
                            f"unfit to build it and continued. {log} says why (look for {name}); fix that and make "
                            "setup again")
        elif fact["error"]:
            problems.append(f"{name} is in the wheel and does not load: {fact['error']}; see {log}")
        elif op in found and wanted - found[op]:
            problems.append(f"{name} has no code for {', '.join(sorted(wanted - found[op]))}, only for "
                            f"{', '.join(sorted(found[op])) or 'no GPU'}; {log} shows what was compiled")
    if facts["adam"] is not None and not facts["adam"] < 1e-6:
        problems.append(f"DeepSpeedCPUAdam differs from torch's AdamW by {facts['adam']:.1e} after one step; see {log}")
    return problems
