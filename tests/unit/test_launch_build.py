"""launch/build_frontier.sh with stand-ins for everything that Frontier has: what is called, in which order, with what.

Nothing of it was run on an AMD machine; this shows the recipe's own logic: order, environment, resuming, faults.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ("build_frontier.sh", "build_rocm.sh", "common.sh", "container.sh", "stage.sh", "sites/frontier.sh")
NOTE = 'printf "%s %s\\n" "$(basename "$0")" "$*" >> "$CALLS"\n'
PYTHON = NOTE + """
case "$*" in
  *torch.version.hip*) echo "${FAKE_TORCH:-2.11.0+rocm7.1 7.1.25424}" ;;
  *doctor*) exit "${FAKE_DOCTOR:-0}" ;;
  *installed_ops*) exit "${FAKE_APEX:-0}" ;;
esac
"""
FAKES = {
    "hipcc": NOTE + 'echo "HIP version: ${FAKE_HIP-7.1.25424-4179531dcd}"\n',
    "git": NOTE + 'if [ "$1" = clone ]; then mkdir -p "$3/.git"; fi\n',
    "conda": NOTE + 'mkdir -p "$4/bin"\ncp "$FAKES/python" "$4/bin/python"\n',
    "make": NOTE + """
env | grep -E '^(HIP_PLATFORM|PYTORCH_ROCM_ARCH|GPU_ARCHS|DS_ACCELERATOR|ROCM_HOME)=' | sort > "$CALLS.make-$1"
if [ "$1" = setup ]; then mkdir -p .venv/bin .venv/stamps; cp "$FAKES/python" .venv/bin/python; fi
if [ "$1" = "${FAKE_BROKEN:-}" ]; then exit 2; fi
""",
    "python": PYTHON,
}
TOOLS = ("bash", "sh", "env", "mkdir", "cp", "mv", "rm", "tail", "head", "sed", "grep", "sort", "basename", "dirname",
         "cat", "id")


class Site:
    """A checkout with the scripts, and a PATH of stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin, self.calls_file = folder / "checkout", folder / "bin", folder / "calls"
        for name in FILES:
            (self.root / "launch" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / "launch" / name, self.root / "launch" / name)
        self.bin.mkdir()
        for name, body in FAKES.items():
            (self.bin / name).write_text("#!/bin/sh\n" + body)
            (self.bin / name).chmod(0o755)
        for name in TOOLS:
            (self.bin / name).symlink_to(shutil.which(name) or f"/usr/bin/{name}")

    def run(self, *arguments: str, code: int = 0, modules: bool = True, **more: str) -> str:
        """Run the script; what it said. ``modules``: there is a module command."""
        env = {"PATH": str(self.bin), "CALLS": str(self.calls_file), "FAKES": str(self.bin), "USER": "me",
               "ROCM_PATH": "/opt/rocm-7.1.1", "HOME": str(self.root), **more}
        if modules:
            env["BASH_FUNC_module%%"] = '() { printf "module %s\\n" "$*" >> "$CALLS"; }'
        self.calls_file.write_text("")
        done = subprocess.run(["bash", str(self.root / "launch/build_frontier.sh"), *arguments], env=env, text=True,
                              capture_output=True, cwd="/", timeout=60, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def positions(calls: list[str], *patterns: str) -> list[int]:
    """Where each pattern is first found; fails where one is not."""
    found = []
    for pattern in patterns:
        hits = [i for i, call in enumerate(calls) if re.search(pattern, call)]
        assert hits, f"{pattern} not in:\n" + "\n".join(calls)
        found.append(hits[0])
    return found


def test_everything_is_built_in_order_with_the_sites_modules(site: Site) -> None:
    said = site.run()
    calls = site.calls()
    order = positions(
        calls, r"module load PrgEnv-gnu", r"module load rocm/", r"hipcc --version", r"conda create",
        r"make setup DEVICE=rocm", r"python -c import torch", r"git clone https://github.com/ROCm/apex",
        r"git .* checkout --force --detach daed852", r"pip install .*/apex$", r"installed_ops",
        r"git clone .*flash-attention", r"submodule update --init csrc/composable_kernel", r"pip install .*/flash$",
        r"flash_attn_2_cuda", r"make kernels DEVICE=rocm", r"doctor --strict --device rocm",
    )
    assert order == sorted(order)
    setup = calls[order[4]]
    assert "TORCH_VERSION=2.11.0" in setup and "TORCH_INDEX=https://download.pytorch.org/whl/rocm7.1" in setup
    assert f"PYTHON={site.root}/.python/bin/python" in setup
    kernels = calls[order[-2]]  # its setup is the same one, or it would make another environment
    assert kernels.startswith(setup.replace("make setup", "make kernels"))
    assert kernels.endswith("KERNELS=cpu rocm ARCHS=gfx90a")
    wanted = ["DS_ACCELERATOR=cuda", "GPU_ARCHS=gfx90a", "HIP_PLATFORM=amd", "PYTORCH_ROCM_ARCH=gfx90a",
              "ROCM_HOME=/opt/rocm-7.1.1"]
    for target in ("setup", "kernels"):
        assert Path(f"{site.calls_file}.make-{target}").read_text().split() == wanted
    assert "ready: " in said


def test_the_modules_are_those_of_the_cluster_file(site: Site) -> None:
    from megatron_port.core.config.loader import load

    site.run()
    loaded = [call.removeprefix("module load ") for call in site.calls() if call.startswith("module load ")]
    assert loaded == list(load("runs/frontier-22b").config.cluster.modules)


def test_a_second_run_builds_only_what_changed(site: Site) -> None:
    site.run(SKIP="flash")
    assert not any("flash-attention" in call for call in site.calls())
    said = site.run()
    assert "2/5 apex: ready" in said
    assert not any("ROCm/apex" in call or "conda" in call for call in site.calls())
    assert any("flash-attention" in call for call in site.calls())
    said = site.run(FAKE_TORCH="2.12.0+rocm7.1 7.1.25424")  # another torch: its extensions are made again
    assert "ready" not in said.split("4/5")[0]
    assert sum("pip install" in call for call in site.calls()) == 2
    assert not any("git clone" in call for call in site.calls()), "the sources are there"


def test_what_fails_stops_it_and_is_done_again(site: Site) -> None:
    said = site.run(code=3, FAKE_APEX="1")
    assert "apex was installed without amp_C" in said and "apex.log" in said
    assert not any("make kernels" in call or "doctor" in call for call in site.calls())
    site.run()
    assert any(call.endswith("/apex") and "pip install" in call for call in site.calls())
    site.run(code=2, FAKE_BROKEN="kernels")
    assert not any("doctor" in call for call in site.calls())
    assert "slow, or be built at run time" in site.run(code=3, FAKE_DOCTOR="3")


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"FAKE_HIP": "nothing"}, "hipcc --version names no HIP version"),
        ({"FAKE_TORCH": "2.11.0 none"}, "torch 2.11.0 has no HIP: set TORCH_INDEX"),
        ({"FAKE_TORCH": "2.11.0+rocm6.4 6.4.43482"}, "take the module of torch's ROCm"),
    ],
)
def test_a_mismatch_is_told_before_anything_is_compiled_against_it(
    site: Site, more: dict[str, Any], text: str
) -> None:
    assert text in site.run(code=3, **more)
    assert not any("git clone" in call for call in site.calls())


def test_a_near_version_is_only_said(site: Site) -> None:
    assert "torch is built for ROCm 7.2.1, hipcc is of 7.1" in site.run(FAKE_TORCH="2.11.0+rocm7.2 7.2.1")


def test_elsewhere_it_says_what_is_missing(site: Site) -> None:
    assert "is this frontier?" in site.run(code=3, modules=False)
    assert "no arguments" in site.run("--help", code=2)
    (site.bin / "conda").unlink()
    assert "set PYTHON=" in site.run(code=3)
    own = site.root / "own-python"
    own.touch()
    site.run(PYTHON=str(own))
    assert any(f"PYTHON={own}" in call for call in site.calls())


def test_the_pins_are_those_of_the_image() -> None:
    recipe = (ROOT / "launch/build_rocm.sh").read_text()
    image = (ROOT / "docker/rocm.Dockerfile").read_text()
    for ours, theirs in (("build_apex", "APEX_COMMIT"), ("build_flash", "FLASH_ATTN_TAG")):
        pin = re.search(rf"^{ours}=(\S+)$", recipe, re.M)
        other = re.search(rf"^ARG {theirs}=(\S+)$", image, re.M)
        assert pin and other and pin.group(1) == other.group(1)
    torch = re.search(r"^ARG TORCH_VERSION=(\S+)$", image, re.M)
    assert torch and f"TORCH_VERSION:-{torch.group(1)}" in recipe


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck() -> None:
    names = [str(ROOT / "launch" / name) for name in ("build_frontier.sh", "build_rocm.sh")]
    done = subprocess.run(["shellcheck", *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert os.access(names[0], os.X_OK)
