"""``preflight``: are the nodes of this job fit for it, and is the network between them? Exit 3 if not.

``node`` on every node by itself, then ``report``, which needs no torch, then ``network`` on all ranks::

    srun --ntasks-per-node=1 megatron-port preflight node run.toml --out DIR
    megatron-port preflight report run.toml --out DIR --nodes "$SLURM_JOB_NODELIST" --select 4
    srun --nodelist="$(cat DIR/selected.txt)" … megatron-port preflight network run.toml --out DIR
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from megatron_port.cli.main import add_rendezvous_options, add_run_options, load_run, on_ranks
from megatron_port.core.config.ranges import local_path
from megatron_port.core.errors import EXIT_ENVIRONMENT, EXIT_OK, ConfigError
from megatron_port.run.launchers import attempt_name, expand_hosts
from megatron_port.tools.preflight import node_file as files
from megatron_port.tools.preflight import verdict as preflight_report

if TYPE_CHECKING:
    from megatron_port.core.dist.rank import ProcessInfo


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare the command and its actions."""
    parser = subparsers.add_parser("preflight", help="check the nodes of a job and the network between them")
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)

    node = actions.add_parser(
        "node", help="check this node alone",
        description="Devices, matmul rates, memory, disk, versions and settings of this node, written to "
        "DIR/node-NAME.json. Start one process per node. Exit 0 whatever is found: `preflight report` judges.",
    )
    _common(node)
    node.add_argument("--expect-devices", type=int, metavar="N",
                      help="devices that the node must have (default: cluster.gpus_per_node where there are GPUs)")

    report = actions.add_parser(
        "report", help="judge the nodes that were checked, and list good and bad ones",
        description="Compare DIR/node-*.json with [preflight] and with each other; write preflight.json, good.txt and "
        "bad.txt (host lists for srun --nodelist and --exclude). Exit 3 if a node is bad and --select is not given.",
    )
    _common(report)
    report.add_argument("--nodes", metavar="HOSTLIST", default="",
                        help="nodes that must have answered, e.g. \"$SLURM_JOB_NODELIST\" (default: those that did)")
    report.add_argument("--select", type=int, metavar="N",
                        help="write the first N good nodes to selected.txt; exit 3 if there are fewer")
    report.add_argument("--unfit", type=local_path, metavar="FILE",
                        help="nodes that are bad for another reason: a line of name, tab and reason each")

    network = actions.add_parser(
        "network", help="measure the network between all ranks, and name what is slow",
        description="All-reduce, all-gather and point-to-point within and between nodes (busbw as in nccl-tests), and "
        "a sweep over pairs of nodes. Start it like `train`. Exit 3 if a node, a link or the whole is too slow.",
    )
    _common(network)
    add_rendezvous_options(network)
    network.add_argument("--message-kib", type=int, metavar="N", default=0,
                         help="size of a message between two ranks (default: 65536 on GPUs, 1024 on CPUs)")


def run(args: argparse.Namespace) -> int:
    """Run the chosen action; return its exit code."""
    code: int = {"node": run_node, "report": run_report, "network": run_network}[args.action](args)
    return code


def _common(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser)
    parser.add_argument("--out", type=local_path, required=True, metavar="DIR", help="folder that every node can write")


def run_node(args: argparse.Namespace) -> int:
    """Check this node and write its file."""
    config = load_run(args).config
    if args.expect_devices is not None and args.expect_devices < 0:
        raise ConfigError(f"--expect-devices {args.expect_devices}: at least 0")
    from megatron_port.tools.preflight.node import check_node, write_node

    content = check_node(config, expect=args.expect_devices)
    path = write_node(args.out, content)
    print(f"{content['node']}: checked in {content['seconds']:.1f} s, see {path}")
    return EXIT_OK


def run_report(args: argparse.Namespace) -> int:
    """Judge all nodes; write the lists and print the table."""
    config, folder, attempt = load_run(args).config, args.out, attempt_name()
    if args.select is not None and args.select < 1:
        raise ConfigError(f"--select {args.select}: at least 1")
    hosts = expand_hosts(args.nodes) if args.nodes else []
    nodes = preflight_report.read_nodes(folder, hosts, attempt)
    if not nodes:
        raise ConfigError(
            f"no node of this job ({attempt}) has written to {folder}; run `preflight node` on each first"
        )
    network = preflight_report.read_network(folder, attempt)
    unfit = files.read_reasons(args.unfit) if args.unfit else {}
    report = preflight_report.make_report(nodes, config.preflight, network, unfit)
    preflight_report.write_report(folder, report, config.preflight, attempt)
    print(preflight_report.render(report))
    faults = (network or {}).get("faults", [])
    for text in faults:
        print(f"fault of the job: {text}")
    if args.select is not None:
        chosen = preflight_report.select(report, args.select)
        files.write_hosts(folder / files.SELECTED, chosen)
        print(f"selected: {(folder / files.SELECTED).read_text().strip()}")
        return EXIT_OK
    return EXIT_ENVIRONMENT if report.bad or faults else EXIT_OK


def run_network(args: argparse.Namespace) -> int:
    """Check the network on this rank."""
    config = load_run(args).config
    if args.message_kib < 0:
        raise ConfigError(f"--message-kib {args.message_kib}: at least 0")

    def measure(info: ProcessInfo) -> int:
        from megatron_port.run.build import topology_of
        from megatron_port.tools.preflight.session import network_check

        result = network_check(config, info, args.out, topology_of, message=args.message_kib << 10)
        # Rank 0 speaks for all: with srun --kill-on-bad-exit others must not end it.
        found = result.blames or result.bad or result.faults
        return EXIT_ENVIRONMENT if found and info.rank == 0 else EXIT_OK

    return on_ranks(args, measure, "torch", "megatron_port.tools.preflight.session")
