"""A headless Chromium that loads pages: what it shows, measures and complains about.

It is driven by the DevTools protocol over a pipe, so that no port is opened and no further package is needed. One
browser serves many tests, because a start takes seconds.
"""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
DEADLINE_S: Final = 60.0
_FLAGS: Final = (
    "--headless",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)


def find() -> str | None:
    """The program; None: not installed."""
    return next((path for path in map(shutil.which, NAMES) if path is not None), None)


class View(NamedTuple):
    """How a page is shown."""

    width: int = 1100
    height: int = 900
    dark: bool = False
    print: bool = False
    phone: bool = False


DESKTOP: Final = View()


class Browser:
    """A running Chromium with one tab."""

    def __init__(self, program: str, profile: Path) -> None:
        reader, to_browser = os.pipe()
        from_browser, writer = os.pipe()
        # Chromium as root needs --no-sandbox. bash, because the protocol's descriptors are 3 and 4.
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        command = [program, *_FLAGS, *sandbox, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{reader} 4>&{writer}', "bash", *command],
            pass_fds=(reader, writer),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(profile)},
        )
        os.close(reader)
        os.close(writer)
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._numbers = itertools.count(1)
        self._events: list[dict[str, Any]] = []
        self._session = ""
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            os.close(self._to)
        os.close(self._from)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def load(self, address: str, view: View = DESKTOP) -> None:
        """Load a page and wait until it is complete."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=view.width,
            height=view.height,
            deviceScaleFactor=1,
            mobile=view.phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if view.dark else "light"}
        self._call("Emulation.setEmulatedMedia", media="print" if view.print else "", features=[scheme])
        self._events.clear()
        self._call("Page.navigate", url=address)
        self._wait_for("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page. The protocol runs it, whatever the page's policy is."""
        return self._call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key, such as Tab."""
        codes = {"Tab": 9, "Enter": 13}
        for kind in ("rawKeyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def complaints(self) -> list[str]:
        """Errors and warnings of the console since the load, violations of the policy among them."""
        self.evaluate("1")  # what the page has caused has arrived before the answer
        found = []
        for event in self._events:
            entry = event["params"].get("entry", {})
            if event["method"] == "Log.entryAdded" and entry["level"] in ("warning", "error"):
                found.append(str(entry["text"]))
            elif event["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
                found.append(json.dumps(event["params"]))
        return found

    def requests(self) -> list[str]:
        """The addresses that the page has loaded, itself and data: among them."""
        sent = [event for event in self._events if event["method"] == "Network.requestWillBeSent"]
        return [str(event["params"]["request"]["url"]) for event in sent]

    def screenshot(self, path: Path, *, full: bool = False, clip: dict[str, float] | None = None) -> None:
        """The page as PNG. `full`: also what is below the window."""
        more: dict[str, Any] = {"captureBeyondViewport": full}
        if full and clip is None:
            size = self._call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"]}
        if clip is not None:
            more["clip"] = {**clip, "scale": 1}
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png", **more)["data"]))

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self._call("Page.printToPDF", printBackground=False)["data"])

    # --- the protocol ------------------------------------------------------------------------------------------------

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            self._events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def _wait_for(self, method: str) -> None:
        while not any(event["method"] == method for event in self._events):
            self._events.append(self._read())

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + DEADLINE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._from, 1 << 20)
            assert part, "the browser has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


@contextlib.contextmanager
def start(program: str) -> Iterator[Browser]:
    """A browser with a profile of its own, removed afterwards."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, Browser(program, Path(profile)) as made:
        yield made
