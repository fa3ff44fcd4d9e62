"""The hub as a child of rank 0: started, ended, and started again when it has died or stopped.

Rank 0 opens the listening socket and the hub inherits it. So the address outlives the hub: whoever connects while there
is none waits in the kernel's queue until the next one accepts, and no rank has to be told where it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_port.core.config.schema import WatchConfig
from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.run.discovery import is_loopback, is_own_address, own_addresses, resolve_host
from megatron_port.run.watch.wire import HUB_STARTS_S

HUB_ENDS_S = 5.0
MOST_RESTARTS = 10
"""Restarts of the hub; a cause that kills it so often would kill the next one too."""


def hub_address(info: ProcessInfo) -> str:
    """Return one address of this host that all ranks can reach: the master's, as the rendezvous uses it."""
    if info.num_nodes == 1:
        return "127.0.0.1"
    with contextlib.suppress(OSError):
        for address in resolve_host(info.master_addr):
            if is_own_address(address) and not is_loopback(address):
                return address
    found = own_addresses()
    return found[0] if found else "127.0.0.1"


class HubProcess:
    """Process of a run's hub. Raises OSError where no socket can be opened.

    ``folder``: of the run. ``replaces``: lost ranks are replaced, so the others are not told to end.
    """

    def __init__(self, config: WatchConfig, info: ProcessInfo, folder: Path, *, replaces: bool = False) -> None:
        self._config, self._info, self._folder, self._replaces = config, info, folder, replaces
        self._secret, self._address = secrets.token_hex(16), hub_address(info)
        self._listener = socket.socket(socket.AF_INET6 if ":" in self._address else socket.AF_INET)
        try:
            self._listener.bind((self._address, 0))
            self._listener.listen(min(4096, info.world_size + 16))
        except OSError:
            self._listener.close()
            raise
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # the watch's thread restarts, the main thread ends
        self._starts = 0
        self._ended = False

    @property
    def where(self) -> dict[str, Any]:
        """Return {address, port, secret}, for ``run.watch.client.Client``."""
        return {"address": self._address, "port": self._listener.getsockname()[1], "secret": self._secret}

    @property
    def pid(self) -> int | None:
        """Process id; None: there is none."""
        return self._process.pid if self._process is not None else None

    def start(self, roster: Sequence[Sequence[Any]] = ()) -> None:
        """Start the hub and wait until it serves.

        Args:
            roster: the ranks that an earlier hub knew (``run.watch.rules.RankIdentity``), so that one that cannot
            connect
                any more is missed.

        Raises:
            OSError: it did not start; TimeoutError: it does not answer.
        """
        receive, answer = os.pipe()
        setup = {
            "secret": self._secret, "folder": str(self._folder.absolute()), "host": self._info.hostname,
            "world": self._info.world_size, "listener": self._listener.fileno(), "answer": answer,
            "config": asdict(self._config), "roster": [list(place) for place in roster], "replaces": self._replaces,
        }
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "megatron_port.run.watch.hub"], stdin=subprocess.PIPE,
                pass_fds=(answer, self._listener.fileno()),
            )
        except OSError:
            os.close(receive)
            raise
        finally:
            os.close(answer)
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(setup).encode() + b"\n")
            process.stdin.flush()
            if not select.select([receive], [], [], HUB_STARTS_S)[0]:
                raise TimeoutError(f"it did not answer within {HUB_STARTS_S:g} s")
            if not os.read(receive, 32):
                raise OSError("it ended at once")
        except OSError:
            process.kill()
            process.wait()
            raise
        finally:
            os.close(receive)
        self._process = process

    def restart(self, roster: Sequence[Sequence[Any]]) -> str:
        """Kill what is left of the hub and start another; return a description of its end.

        Raises:
            OSError: it cannot be started, has been too often, or the run is ending.
        """
        with self._lock:
            if self._ended:
                raise OSError("the run is ending")
            self._starts += 1
            if self._starts > MOST_RESTARTS:
                raise OSError(f"it was started again {MOST_RESTARTS} times")
            code = self._kill()
            self.start(roster)
        if code is None:
            return "it was stopped or hung"
        return f"it was killed by signal {-code}" if code < 0 else f"it ended with exit code {code}"

    def _kill(self) -> int | None:
        """Kill the hub at once; return its exit code if it had ended by itself."""
        process, self._process = self._process, None
        if process is None:
            return None
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):  # its connections end a moment before it does
            code = process.wait(0.5)
        process.kill()
        process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        return code

    def end(self, *, leave: bool = False) -> None:
        """Wait for the hub: it ends by itself when every rank has left or been told to.

        ``leave``: do not wait. Ranks may be stuck in a step until this one has closed its connections.
        """
        with self._lock:
            self._ended = True
            process = self._process
            if leave:
                if process is not None and process.stdin is not None:
                    with contextlib.suppress(OSError):
                        process.stdin.close()
                self._listener.close()
                return
            if process is not None and process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(HUB_ENDS_S)
            self._kill()  # a rank that has not left yet is no longer this run's concern
            self._listener.close()
