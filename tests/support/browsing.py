"""Headless Chromium, and the dashboard as a process that it can visit."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.commands import RunningCommand, running_command, until

FLAGS: Final = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_CSS: Final = "css selector"  # selenium.webdriver.common.by.By.CSS_SELECTOR
_URL: Final = re.compile(r"(http://\S+?/)[\s?]")


@contextlib.contextmanager
def dashboard(*arguments: str) -> Iterator[tuple[str, RunningCommand]]:
    """Run `redelastic dashboard`; yields its URL, with a trailing slash, and the process."""
    with running_command("dashboard", "--port=0", *arguments) as process:
        until(lambda: "Ctrl-C" in process.out or process.process.poll() is not None, "it serves", 120)
        found = _URL.search(process.out)
        assert found, process.out
        yield found[1], process


class Browser:
    """Headless Chromium with one page; the test is skipped where it is not installed."""

    def __init__(self, profile: Path) -> None:
        chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
        if chromium is None or driver is None:
            pytest.skip("needs a browser: apt-get install chromium chromium-driver")
        from selenium import webdriver  # of the extra `long`
        from selenium.common.exceptions import StaleElementReferenceException

        self._actions: Any = webdriver.ActionChains
        self._stale: Any = StaleElementReferenceException  # an element that the page has replaced
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        self.driver.set_page_load_timeout(60)

    def open(self, url: str, width: int = 1280, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get(url)

    def find(self, selector: str) -> Any:
        """The first element that matches."""
        return self.driver.find_element(_CSS, selector)

    def find_all(self, selector: str) -> list[Any]:
        """The elements that match."""
        return list(self.driver.find_elements(_CSS, selector))

    def hover(self, selector: str) -> None:
        """Move the mouse to the middle of the first element that matches."""
        self._actions(self.driver).move_to_element(self.find(selector)).perform()

    def text(self, selector: str) -> str:
        """The text of the elements that match, a line or more for each; "" while the page replaces them."""
        with contextlib.suppress(self._stale):
            return "\n".join(found.text for found in self.find_all(selector))
        return ""

    def until(self, selector: str, reads: str | Callable[[str], object]) -> str:
        """Wait until the text of `selector` contains a string or passes a test; returns that text."""
        holds = (lambda text: reads in text) if isinstance(reads, str) else reads
        until(lambda: holds(self.text(selector)), f"{selector} reads {reads}: {self.text('body')}", 60)
        return self.text(selector)

    def click(self, label: str, selector: str) -> None:
        """Click the element that matches and has this text, once it is shown."""

        def shown() -> list[Any]:
            with contextlib.suppress(self._stale):
                found = self.find_all(selector)
                return [one for one in found if one.is_displayed() and one.text == label]
            return []

        until(shown, f"{selector} has {label}: {self.text('body')}", 60)
        shown()[0].click()

    def rows(self) -> dict[str, str]:
        """The state shown for each node on the page, by the node's name."""
        script = """return [...document.querySelectorAll(".nodes tbody tr:not(.gap)")].map(
            (row) => [row.querySelector(".c-node").textContent, row.querySelector(".c-state").textContent])"""
        return dict(self.run(script))

    def run(self, script: str) -> Any:
        """The return value of a script run in the page."""
        return self.driver.execute_script(script)

    def console_errors(self) -> list[str]:
        """Console messages since the last call: errors and violations of the content security policy."""
        messages = [entry["message"] for entry in self.driver.get_log("browser")]
        return [message for message in messages if "net::ERR_" not in message]  # a test has ended its server

    def close(self) -> None:
        self.driver.quit()
