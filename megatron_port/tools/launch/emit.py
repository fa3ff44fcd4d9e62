"""The same run for other schedulers: a script for Flux, PBS or LSF, a JobSet for Kubernetes, a task for SkyPilot.

Thin templates: one job that starts the ranks through the scheduler's own launcher, which ``dist.launchers`` and
torchrun understand. What needs a scheduler's answers (requeue, chain, preflight, staging) is SLURM's only; elsewhere
the run resumes from its newest checkpoint when the same job is submitted again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from megatron_port.core.config.dump import to_toml
from megatron_port.core.config.launch_checks import wall_seconds, wall_text
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import ConfigError
from megatron_port.tools.launch.script import (
    Order,
    directive_name,
    directive_word,
    exports,
    kubernetes_value,
    shell_quote,
)

PORT = 29500
CLAIM = "megatron-port"
"""Persistent volume claim that holds the runs."""


def emit(kind: str, config: RunConfig, order: Order, python: str, gpu: str) -> str:
    """Return the text for one of ``KINDS``; ``gpu``: SkyPilot's name of the accelerator.

    Raises:
        ConfigError: a value that cannot be said there, or an image that is missing.
    """
    return KINDS[kind](config, order, python, gpu)


def _script(config: RunConfig, head: list[str], body: list[str]) -> str:
    environment = exports(config.cluster.environment, "cluster.environment")
    environment += exports(config.launch.environment, "launch.environment")
    return "\n".join([
        "#!/bin/bash", *head, "",
        "set -euo pipefail", "# shellcheck disable=SC2034", 'port_user=${USER:-$(id -un)}',
        "# shellcheck disable=SC2034",
        f"site_local_disk={shell_quote(config.cluster.local_disk, 'cluster.local_disk')}",
        *(f"module load {shell_quote(m, 'cluster.modules')}" for m in config.cluster.modules), *environment,
        f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{max(1, config.cluster.cores_per_task)}}}", *body,
    ]) + "\n"


def _train(order: Order, python: str) -> str:
    words = [python, "-m", "megatron_port", "train", order.run]
    for text in order.overrides:
        words += ["--set", text]
    return " ".join(shell_quote(w, "the command") for w in words)


def _minutes(config: RunConfig) -> int:
    return -(-(wall_seconds(config.launch.time) or 0) // 60)


def flux(config: RunConfig, order: Order, python: str, gpu: str) -> str:
    """Return a script for ``flux batch``."""
    c, ranks = config.cluster, config.cluster.nodes * config.cluster.gpus_per_node
    name = directive_name(config.name)
    options = [f"-N {c.nodes}", f"-n {ranks}", f"-t {_minutes(config)}m", "--exclusive", f"--job-name={name}",
               f"--output={name}-{{{{id}}}}.out"]
    if c.partition:
        options.append(f"--queue={directive_word(c.partition, 'cluster.partition')}")
    if config.launch.account:
        options.append(f"--bank={directive_word(config.launch.account, 'launch.account')}")
    cores = f" --cores-per-task={c.cores_per_task}" if c.cores_per_task else ""
    return _script(config, [f"#flux: {o}" for o in options], [
        "MASTER_ADDR=$(flux hostlist --nth=0 local)", "export MASTER_ADDR",
        f"exec flux run -N {c.nodes} -n {ranks}{cores} --gpus-per-task=1 -o gpu-affinity=per-task \\",
        f"  {_train(order, python)}",
    ])


def pbs(config: RunConfig, order: Order, python: str, gpu: str) -> str:
    """Return a script for ``qsub``, whose ``mpiexec`` is PALS' or Hydra's."""
    c = config.cluster
    head = [f"#PBS -N {directive_name(config.name)}",
            f"#PBS -l select={c.nodes}:ngpus={c.gpus_per_node}:mpiprocs={c.gpus_per_node}",
            f"#PBS -l walltime={wall_text(wall_seconds(config.launch.time) or 0)}", "#PBS -j oe", "#PBS -r y"]
    if c.partition:
        head.append(f"#PBS -q {directive_word(c.partition, 'cluster.partition')}")
    if config.launch.account:
        head.append(f"#PBS -A {directive_word(config.launch.account, 'launch.account')}")
    return _script(config, head, [
        'cd "$PBS_O_WORKDIR"', 'MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE")', "export MASTER_ADDR",
        f"exec mpiexec -n {c.nodes * c.gpus_per_node} --ppn {c.gpus_per_node} --env MASTER_ADDR=\"$MASTER_ADDR\" \\",
        f"  {_train(order, python)}",
    ])


def lsf(config: RunConfig, order: Order, python: str, gpu: str) -> str:
    """Return a script for ``bsub``, whose launcher is jsrun."""
    c = config.cluster
    name = directive_name(config.name)
    head = [f"#BSUB -J {name}", f"#BSUB -nnodes {c.nodes}", f"#BSUB -W {_minutes(config)}",
            f"#BSUB -o {name}-%J.out", "#BSUB -r"]
    if c.partition:
        head.append(f"#BSUB -q {directive_word(c.partition, 'cluster.partition')}")
    if config.launch.account:
        head.append(f"#BSUB -P {directive_word(config.launch.account, 'launch.account')}")
    cores = f" -c {c.cores_per_task}" if c.cores_per_task else ""
    return _script(config, head, [
        "# The first host of the list is the one of this script.",
        'MASTER_ADDR=$(sort -u "$LSB_DJOB_HOSTFILE" | grep -v -F -x "$(hostname)" | head -n 1)', "export MASTER_ADDR",
        f"exec jsrun -n {c.nodes * c.gpus_per_node} -r {c.gpus_per_node} -a 1 -g 1{cores} -E MASTER_ADDR \\",
        f"  {_train(order, python)}",
    ])


def _dns(name: str) -> str:
    text = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    if not text or not text[0].isalpha():
        raise ConfigError(f"name {name!r} makes no name for Kubernetes; begin it with a letter")
    return text


def _torchrun(config: RunConfig, node_rank: str, master: str, path: str) -> str:
    c = config.cluster
    return (
        f"exec torchrun --nnodes={c.nodes} --nproc-per-node={c.gpus_per_node} --node-rank={node_rank} "
        f"--master-addr={master} --master-port={PORT} -m megatron_port train {path}"
    )


def jobset(config: RunConfig, order: Order, python: str, gpu: str) -> str:
    """Return a ConfigMap with the configuration and a JobSet (jobset.x-k8s.io/v1alpha2), for ``kubectl apply -f``."""
    c, name = config.cluster, _dns(config.name)
    if not c.container_image:
        raise ConfigError("cluster.container_image is empty: the pods need an image; docker/cuda.Dockerfile makes one")
    pairs = (entry.partition("=") for entry in config.launch.environment)
    environment = [{"name": k, "value": kubernetes_value(v)} for k, _, v in pairs]
    container: dict[str, Any] = {
        "name": "ranks", "image": c.container_image, "workingDir": "/work", "env": environment,
        "command": ["bash", "-c", _torchrun(config, "$JOB_COMPLETION_INDEX", f"{name}-ranks-0-0.{name}",
                                            "/etc/megatron_port/config.toml")],
        "ports": [{"containerPort": PORT}],
        "resources": {"limits": {"nvidia.com/gpu": c.gpus_per_node}},
        "volumeMounts": [{"name": "configuration", "mountPath": "/etc/megatron_port"},
                         {"name": "work", "mountPath": "/work"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {
        "restartPolicy": "Never", "containers": [container],
        "terminationGracePeriodSeconds": config.launch.signal_seconds,
        "volumes": [{"name": "configuration", "configMap": {"name": name}},
                    {"name": "work", "persistentVolumeClaim": {"claimName": CLAIM}},
                    {"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    job = {"completionMode": "Indexed", "completions": c.nodes, "parallelism": c.nodes, "backoffLimit": 0,
           "activeDeadlineSeconds": wall_seconds(config.launch.time), "template": {"spec": pod}}
    items = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"config.toml": to_toml(config)}},
        {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": name}, "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "failurePolicy": {"maxRestarts": config.launch.max_attempts},
            "replicatedJobs": [{"name": "ranks", "replicas": 1, "template": {"spec": job}}]}},
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=1) + "\n"


def skypilot(config: RunConfig, order: Order, python: str, gpu: str) -> str:
    """Return a task for ``sky launch`` or ``sky jobs launch`` (JSON, which is YAML too)."""
    c = config.cluster
    resources: dict[str, Any] = {"accelerators": f"{gpu}:{c.gpus_per_node}"}
    if c.container_image:
        resources["image_id"] = f"docker:{c.container_image}"
    write = "mkdir -p ~/megatron_port && cat > ~/megatron_port/config.toml <<'END_OF_CONFIGURATION'\n"
    task = {
        "name": _dns(config.name), "num_nodes": c.nodes, "resources": resources,
        "envs": dict(e.split("=", 1) for e in config.launch.environment),
        "setup": f"{write}{to_toml(config)}END_OF_CONFIGURATION\npython3 -c 'import megatron_port'",
        "run": "MASTER_ADDR=$(echo \"$SKYPILOT_NODE_IPS\" | head -n 1)\n"
        + _torchrun(config, "$SKYPILOT_NODE_RANK", '"$MASTER_ADDR"', "~/megatron_port/config.toml"),
    }
    return json.dumps(task, indent=1) + "\n"


KINDS: dict[str, Callable[[RunConfig, Order, str, str], str]] = {
    "flux": flux, "pbs": pbs, "lsf": lsf, "jobset": jobset, "skypilot": skypilot,
}
"""Writers of ``launch show --for`` for schedulers other than SLURM."""
