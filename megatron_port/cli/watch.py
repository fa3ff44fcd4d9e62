"""``watch RUN``: a live page of a run on this machine's loopback interface."""

from __future__ import annotations

import argparse
import getpass
import socket
from typing import Any

from megatron_port.cli.arguments import add_json, print_json
from megatron_port.core.config.ranges import expanded
from megatron_port.core.errors import EXIT_OK, ConfigError


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "watch", help="a live page of a run, in a browser",
        description="Serve a page with the curves, ranks, phases, memory, events and experts of a run, on 127.0.0.1 "
        "alone, while it trains or afterwards. It reads the run's files, so it can be started on any node that sees "
        "them, and stopped at any time with Ctrl-C. From elsewhere, reach it through an SSH tunnel.",
    )
    parser.add_argument("run", type=expanded, metavar="RUN",
                        help="a run's folder, its run file, or the name of a shipped one")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="of the page (default: one that is free)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted. Raises ConfigError, EnvironmentFault."""
    from megatron_port.cli.run_names import run_folder_of
    from megatron_port.tools.live.server import LiveServer

    if not 0 <= args.port < 1 << 16:
        raise ConfigError(f"--port {args.port}: from 0 to 65535")
    folder = run_folder_of(args.run)
    with LiveServer(folder, port=args.port) as server:
        port = server.server_address[1]
        if args.json:
            print_json({"run": str(folder), "url": server.url, "host": socket.gethostname(), "port": port})
        else:
            print(f"{folder}: {server.url}\n"
                  f"from elsewhere: ssh -L {port}:127.0.0.1:{port} {getpass.getuser()}@{socket.gethostname()}, and the "
                  "same address there\nCtrl-C ends it; the run is not touched", flush=True)
        server.serve_forever(poll_interval=0.2)
    return EXIT_OK
