"""A headless Chromium, driven by Chrome's DevTools protocol through two pipes: no package needed.

    with Browser() as browser:
        page = browser.open(path)
        page.hover(120, 80); page.press("+"); page.text("#tip")

It is the system's own (``apt-get install chromium``), or the one that ``CHROMIUM`` names.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

TIMEOUT = 60.0  # seconds for an answer: a browser that starts on a busy machine takes some
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def program() -> str | None:
    """Chromium's program, if there is one."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A browser of one test: without network, with a profile of its own."""

    def __init__(self) -> None:
        found = program()
        assert found is not None
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [found, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += ["--disable-dev-shm-usage", "--remote-debugging-pipe", "--no-first-run"]
        command += [
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={self._profile.name}",
        ]
        script = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'  # the protocol's descriptors
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command, "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._waiting = b""
        self._count = 0

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(TIMEOUT)
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def call(self, method: str, session: str | None = None, **given: Any) -> dict[str, Any]:
        """Call a method of the protocol; returns its result."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": given}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + TIMEOUT
        while True:
            answer = self._receive(until)
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._waiting:
            ready, _, _ = select.select([self._in], [], [], max(0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            read = os.read(self._in, 1 << 16)
            assert read, "the browser has ended"
            self._waiting += read
        text, _, self._waiting = self._waiting.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found

    def open(self, path: Path, width: int = 1400, height: int = 1000, dark: bool = False) -> Page:
        """Open a file, and wait until it is drawn."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        page.call("Page.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=path.resolve().as_uri())
        until = time.monotonic() + TIMEOUT
        while (
            page.run("document.readyState") != "complete"
            or page.run("location.href") == "about:blank"
        ):
            assert time.monotonic() < until, "the page does not load"
            time.sleep(0.05)
        page.drawn()
        return page


class Page:
    """A page, as somebody uses it who sees it and has a mouse and a keyboard."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        """Call a method of the protocol for this page."""
        return self._browser.call(method, self._session, **given)

    def run(self, code: str) -> Any:
        """The value of an expression in the page; a promise's, when it is there."""
        given = {"expression": code, "returnByValue": True, "awaitPromise": True}
        found = self.call("Runtime.evaluate", **given)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def drawn(self) -> None:
        """Wait until two frames are drawn."""
        self.run("new Promise(f => requestAnimationFrame(() => requestAnimationFrame(() => f(1))))")

    def text(self, selector: str) -> str:
        """What somebody reads in an element; "" where it is hidden."""
        element = f"document.querySelector({json.dumps(selector)})"
        shown = f"{element}?.checkVisibility()"
        found: str = self.run(f"{shown} ? {element}.innerText : ''")
        return found

    def texts(self, selector: str) -> list[str]:
        """The same of all elements."""
        elements = f"[...document.querySelectorAll({json.dumps(selector)})]"
        found: list[str] = self.run(f"{elements}.map(e => e.innerText)")
        return found

    def box(self, selector: str, number: int = 0) -> tuple[float, float, float, float]:
        """Left, top, width and height of an element, in the window."""
        element = f"document.querySelectorAll({json.dumps(selector)})[{number}]"
        box = self.run(
            f"(b => [b.left, b.top, b.width, b.height])({element}.getBoundingClientRect())"
        )
        return (box[0], box[1], box[2], box[3])

    def hover(self, x: float, y: float) -> None:
        """Move the mouse."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.drawn()

    def click(self, x: float, y: float) -> None:
        """Press and release the left button."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.drawn()

    def drag(self, x: float, y: float, by: float) -> None:
        """Drag from a place to one beside it."""
        self.call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, button="left")
        for part in (0.3, 0.7, 1.0):
            self.call(
                "Input.dispatchMouseEvent",
                type="mouseMoved",
                x=x + by * part,
                y=y,
                button="left",
                buttons=1,
            )
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=x + by, y=y, button="left")
        self.drawn()

    def wheel(self, x: float, y: float, by: float) -> None:
        """Turn the wheel."""
        self.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by)
        self.drawn()

    def press(self, key: str) -> None:
        """Press a key and let it go."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowDown": 40}
        given: dict[str, Any] = {
            "key": key,
            "windowsVirtualKeyCode": codes.get(key, ord(key[0].upper())),
        }
        if len(key) == 1:
            given["text"] = key
        elif key == "Enter":
            given["text"] = "\r"
        self.call("Input.dispatchKeyEvent", type="keyDown", **given)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.drawn()
