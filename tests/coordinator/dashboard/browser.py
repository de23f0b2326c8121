"""A real browser without a screen, for the tests of the live page: Debian's `chromium` and `chromium-driver`."""

from __future__ import annotations

import base64
import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium and chromedriver here: apt-get install chromium chromium-driver"
)


@contextlib.contextmanager
def browser(folder: Path, width: int = 1600, *, dark: bool = False) -> Iterator[webdriver.Chrome]:
    """A browser with a profile of its own, in this folder. It loads nothing by itself."""
    options = Options()
    options.binary_location = CHROMIUM or ""
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        f"--user-data-dir={folder}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(DRIVER))
    try:
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        yield driver
    finally:
        driver.quit()


def complaints(driver: webdriver.Chrome) -> list[str]:
    """What the browser's console has: errors of scripts, refusals of the Content-Security-Policy, missing files."""
    entries: list[dict[str, str]] = driver.get_log("browser")  # type: ignore[no-untyped-call]  # selenium's
    return [f"{entry['level']} {entry['message']}" for entry in entries]


def save_picture(driver: webdriver.Chrome, path: Path, most: int = 10_000) -> None:
    """All of the page, or its upper part of at most `most` pixels, as PNG."""
    width, height = driver.execute_script("return [innerWidth, document.documentElement.scrollHeight]")
    clip = {"x": 0, "y": 0, "width": width, "height": min(height, most), "scale": 1}
    screenshot = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    path.write_bytes(base64.b64decode(screenshot["data"]))
