"""Look at a file in headless Chromium, light and dark: what it requests, what it logs, a picture.

    python tests/e2e/browser.py runs/quickstart/report.html --out docs/images/report

Speaks the DevTools protocol over a pipe (JSON messages that end with a zero byte, on descriptors 3 and 4).
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SCHEMES = ("light", "dark")


def chromium() -> str | None:
    """The first browser on the PATH."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Seen:
    """What one look at a page gave."""

    png: bytes
    background: str
    """Computed colour of the body."""
    height: int
    width: int
    """Of the content, in CSS pixels."""
    requests: list[str] = field(default_factory=list)
    """Every URL that the page asked for, its own first."""
    console: list[str] = field(default_factory=list)


class Browser:
    """A headless Chromium with one page. A context manager."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe",
                 "--disable-background-networking", f"--user-data-dir={self._profile}", "about:blank"]

        # Descriptors may be 3 or 4 already, so they are moved out of the way first.
        def arrange() -> None:
            a, b = os.dup(to_read), os.dup(to_write)
            a, b = (os.dup(x) if x in (3, 4) else x for x in (a, b))
            os.dup2(a, 3)
            os.dup2(b, 4)

        self._process = subprocess.Popen(
            [program, *flags], preexec_fn=arrange, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._ids, self.events = b"", itertools.count(1), []  # type: tuple[bytes, Any, list[Any]]
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = ""
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command; events on the way are kept."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session := getattr(self, "_session", ""):
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message(30.0)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self.events.append(answer)

    def _message(self, seconds: float) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"the browser said nothing for {seconds:g} s")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise RuntimeError("the browser has ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def look(
        self, file: Path | str, scheme: str, *, width: int = 1100, height: int = 0, seconds: float = 0.3
    ) -> Seen:
        """Open a file, or a URL, as a reader whose system asks for ``scheme``. ``height`` 0: all of the page.

        ``seconds``: how long requests that come late are waited for.
        """
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height or 900, deviceScaleFactor=1,
                  mobile=False)
        self.events.clear()
        self.call("Page.navigate", url=file if isinstance(file, str) else file.resolve().as_uri())
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._message(30.0))
        time.sleep(seconds)
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        colour = self.call("Runtime.evaluate", expression="getComputedStyle(document.body).backgroundColor")
        clip = {"x": 0, "y": 0, "width": width, "height": height or size["height"], "scale": 1}
        png = base64.b64decode(self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"])
        seen = Seen(png, str(colour["result"]["value"]), int(size["height"]), int(size["width"]))
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Network.requestWillBeSent":
                seen.requests.append(params["request"]["url"])
            elif method == "Runtime.consoleAPICalled":
                seen.console.append(str([a.get("value", a.get("description")) for a in params["args"]]))
            elif method == "Runtime.exceptionThrown":
                seen.console.append(str(params["exceptionDetails"].get("text")))
            elif method == "Log.entryAdded":
                seen.console.append(str(params["entry"].get("text")))
        return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", help="pictures go to OUT-light.png and OUT-dark.png")
    parser.add_argument("--width", type=int, default=1100)
    parser.add_argument("--height", type=int, default=0, help="of the pictures; 0: the whole page")
    args = parser.parse_args()
    program = chromium()
    if program is None:
        print(f"error: none of {', '.join(NAMES)} is on the PATH", file=sys.stderr)
        return 3
    bad = 0
    with Browser(program) as browser:
        for scheme in SCHEMES:
            seen = browser.look(args.file, scheme, width=args.width, height=args.height)
            others = [url for url in seen.requests if url != args.file.resolve().as_uri()]
            print(f"{scheme}: {len(others)} requests beside the file, {len(seen.console)} console messages, "
                  f"{seen.width} x {seen.height} pixels, background {seen.background}")
            for line in others + seen.console:
                print(f"  {line}")
            bad += len(others) + len(seen.console)
            if args.out:
                Path(f"{args.out}-{scheme}.png").write_bytes(seen.png)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
