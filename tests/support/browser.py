"""The server's page in a browser: actions of a user, and the content of the screen."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from support.waiting import until as wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")

REPEATED = "this is the one and this is the one and this is the one and this"


@contextmanager
def chromium() -> Iterator["Browser"]:
    """A browser; without one the test is skipped.

    While it is open, its thread has a running event loop.
    """
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    with sync_api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except sync_api.Error:
            pytest.skip("no Chromium is installed")
        yield browser
        browser.close()


def until(page: "Page", true: str, value: Any = None) -> None:
    """Wait until a JavaScript function of `value` returns true.

    Playwright's own way has the page evaluate strings, which the page's policy forbids it.
    """
    wait_until(lambda: page.evaluate(true, value))


def opened(page: "Page", url: str, *, settings: bool = True) -> None:
    """Load the page, with its settings next to the chat."""
    page.goto(url)
    until(page, "document.getElementById('model').textContent.trim() !== ''")
    if settings:
        page.get_by_role("button", name="Settings").click()


def ask(
    page: "Page", text: str = REPEATED, tokens: int | str = 60, temperature: str | None = "0"
) -> None:
    """Ask, greedy unless a test says otherwise: a sampled answer may end at its first token."""
    page.get_by_label("Max tokens").fill(str(tokens))
    if temperature is not None:
        page.get_by_label("Temperature").fill(temperature)
    send(page, text)


def send(page: "Page", text: str) -> None:
    """Send a message, with the settings as they are."""
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def ended(page: "Page", answers: int = 1) -> None:
    """Wait until `answers` answers have ended."""
    until(
        page,
        "count => document.querySelectorAll('.model .note').length === count"
        " && document.getElementById('stop').hidden",
        answers,
    )


def words(page: "Page") -> str:
    """The text of the last answer."""
    return page.locator(".model .words").last.text_content() or ""


def note(page: "Page") -> str:
    """The line below the last answer."""
    return page.locator(".model .note").last.text_content() or ""


def alert(page: "Page", part: str) -> None:
    """Wait for a line about what went wrong that contains `part`."""
    until(page, "part => document.getElementById('alert').textContent.includes(part)", part)
