"""Debian's Chromium without a window, as tests drive it; its errors and requests."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from support.processes import wait_until

OBSTACLE = None if shutil.which("chromium") and shutil.which("chromedriver") else "no chromium and chromedriver"


class Page:
    """A page in its own browser."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self._driver = driver

    def open(self, address: str, width: int = 1280, height: int = 1000) -> None:
        """Show an address in a window of this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self._driver.get(address)

    def run(self, script: str) -> object:
        """The value that a script returns."""
        return self._driver.execute_script(script)

    def text(self, selector: str = "body") -> str:
        """The words that a person reads in the first element; empty if there is none."""
        text = self.run(f"return document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return " ".join(str(text).split())

    def wait_for(self, text: str, selector: str = "body", timeout_s: float = 60) -> None:
        """Return when an element contains a text."""
        wait_until(lambda: text in self.text(selector), timeout_s, f"{text!r} in {selector}")

    def picture(self, path: Path) -> None:
        """Write what the window shows as a PNG with a palette."""
        with Image.open(BytesIO(self._driver.get_screenshot_as_png())) as image:
            image.convert("RGB").quantize(256, kmeans=1).save(path, optimize=True)

    def errors(self) -> list[str]:
        """Errors and warnings in the console since the last call."""
        return [entry["message"] for entry in self._driver.get_log("browser")]

    def requested(self) -> set[str]:
        """Addresses that the page asked for since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self._driver.get_log("performance")]
        return {each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"}


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A browser whose profile is in `folder`; it asks nothing of the network by itself."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (
        "--headless=new",
        "--no-sandbox",  # Chromium's own needs another user than root
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-default-apps",
        "--disable-extensions",
        "--disable-sync",
        "--no-first-run",
        "--no-proxy-server",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--user-data-dir={folder}",
        "about:blank",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver") or ""))
    try:
        yield Page(driver)
    finally:
        driver.quit()
