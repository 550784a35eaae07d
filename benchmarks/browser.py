"""A headless Chromium, driven through chromedriver's own HTTP interface: nothing to install.

For pages that oomph writes: what they show, what they ask the network for, how fast they open.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

#: Those of the WebDriver standard.
KEYS = {"Enter": "\ue007", "Home": "\ue011", "End": "\ue010", "Tab": "\ue004", "Left": "\ue012"}
KEYS |= {"Right": "\ue014", "PageUp": "\ue00e", "Escape": "\ue00c", "Backspace": "\ue003"}
_SANDBOX = ("--no-sandbox",) if os.geteuid() == 0 else ()


def find_browser() -> tuple[str, str] | None:
    """The paths of a Chromium and its chromedriver, where both are there."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((path for name in names if (path := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


class Browser:
    """One window."""

    def __init__(self, port: int, browser: str, size: tuple[int, int], dark: bool) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        options = {
            "binary": browser,
            "args": [
                "--headless=new",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--window-size={size[0]},{size[1]}",
                *_SANDBOX,
            ],
            "prefs": {},
        }
        self._session = ""
        session = self._ask(
            "POST",
            "",
            {
                "capabilities": {
                    "alwaysMatch": {
                        "browserName": "chrome",
                        "goog:chromeOptions": options,
                        "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
                    }
                }
            },
        )
        self._session = f"/{session['sessionId']}"
        width, height = size
        self._devtools(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._devtools("Emulation.setEmulatedMedia", {"features": [scheme]})

    def open(self, page: Path) -> None:
        """Load a file, and wait until it is there."""
        self._ask("POST", "/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """The result of a function body."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": arguments})

    def wait(self, script: str) -> Any:
        """The value that a function body hands to the function `done`."""
        script = f"const done = arguments[arguments.length - 1]; {script}"
        return self._ask("POST", "/execute/async", {"script": script, "args": []})

    def press(self, *keys: str) -> None:
        """Type keys, one after the other, into what has the focus."""
        actions = [
            {"type": kind, "value": KEYS.get(key, key)}
            for key in keys
            for kind in ("keyDown", "keyUp")
        ]
        keyboard = {"type": "key", "id": "keyboard", "actions": actions}
        self._ask("POST", "/actions", {"actions": [keyboard]})

    def click(self, x: int, y: int) -> None:
        """Press the mouse at a place of the window."""
        actions = [
            {"type": "pointerMove", "duration": 0, "x": x, "y": y},
            {"type": "pointerDown", "button": 0},
            {"type": "pointerUp", "button": 0},
        ]
        self._ask("POST", "/actions", {"actions": [_mouse(actions)]})

    def drag(self, start: tuple[int, int], stop: tuple[int, int]) -> None:
        """Pull the mouse from one place of the window to another."""
        middle = ((start[0] + stop[0]) // 2, (start[1] + stop[1]) // 2)
        moves = [{"type": "pointerMove", "duration": 20, "x": x, "y": y} for x, y in (middle, stop)]
        actions = [
            {"type": "pointerMove", "duration": 0, "x": start[0], "y": start[1]},
            {"type": "pointerDown", "button": 0},
            *moves,
            {"type": "pointerUp", "button": 0},
        ]
        self._ask("POST", "/actions", {"actions": [_mouse(actions)]})

    def complaints(self) -> list[str]:
        """What the page wrote to the console since it was last asked."""
        return [entry["message"] for entry in self._log("browser")]

    def requests(self) -> list[str]:
        """The addresses the page asked for since this was last asked."""
        entries = (json.loads(entry["message"])["message"] for entry in self._log("performance"))
        return [
            entry["params"]["request"]["url"]
            for entry in entries
            if entry["method"] == "Network.requestWillBeSent"
        ]

    def picture(self, path: Path) -> None:
        """The whole page as a PNG file."""
        script = "return [innerWidth, document.documentElement.scrollHeight]"
        width, height = self.run(script)
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self._devtools(
            "Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True}
        )
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """End the session and its browser."""
        self._ask("DELETE", "")
        self._connection.close()

    def _log(self, kind: str) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self._ask("POST", "/se/log", {"type": kind})
        return entries

    def _devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        content = json.dumps(body) if body is not None else None
        self._connection.request(method, f"/session{self._session}{path}", content)
        value = json.loads(self._connection.getresponse().read())["value"]
        if isinstance(value, dict) and "error" in value:
            raise RuntimeError(f"{path}: {value['error']}: {value['message']}")
        return value


def _mouse(actions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "type": "pointer",
        "id": "mouse",
        "parameters": {"pointerType": "mouse"},
        "actions": list(actions),
    }


@contextlib.contextmanager
def browsing(size: tuple[int, int] = (1280, 900), *, dark: bool = False) -> Iterator[Browser]:
    """A browser for as long as it is needed."""
    found = find_browser()
    if found is None:
        raise RuntimeError("no Chromium with its chromedriver is installed here")
    browser, driver = found
    with subprocess.Popen(
        [driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            window = Browser(_port(process), browser, size, dark)
            try:
                yield window
            finally:
                window.close()
        finally:
            process.terminate()


def _port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.search(r"successfully on port (\d+)", line):
            return int(match[1])
    raise RuntimeError("chromedriver ended before it began")
