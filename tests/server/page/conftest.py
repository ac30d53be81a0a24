import re
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from paceline.runtime.model import Model
from support.browser import chromium
from support.other_clients import slowed
from support.server import Running, running
from support.waiting import PATIENCE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

EXPECTED = re.compile(
    "failed: .*/completions|"
    "Failed to load resource: (.* status of 40[014] |"
    "net::ERR_(CONNECTION_REFUSED|CONNECTION_RESET|INCOMPLETE))"
)
"""Messages of the browser after Stop, and for a rejected request or an unreachable server."""


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: "Browser") -> Iterator["Page"]:
    """A blank page in a browser without chats.

    A test fails if the page logs an error or loads anything from another host.
    """
    context = browser.new_context(viewport={"width": 1200, "height": 820})
    context.set_default_timeout(1000 * PATIENCE)
    page = context.new_page()
    complaints: list[str] = []

    def on_console(message: "ConsoleMessage") -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    def on_request(request: "Request") -> None:
        url = urlsplit(request.url)
        if url.scheme not in ("blob", "data") and url.hostname != "127.0.0.1":
            complaints.append(f"to another host: {request.url}")

    def on_failure(request: "Request") -> None:
        # A reload, or the end of a server, ends the load of the icon.
        if not request.url.endswith("/page.svg"):
            complaints.append(f"failed: {request.url}")

    context.on("request", on_request)
    page.on("console", on_console)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", on_failure)
    yield page
    assert not [line for line in complaints if not EXPECTED.match(line)]
    context.close()


@pytest.fixture
def slow(module_model: Model) -> Iterator[Running]:
    """A server with forward passes of 20 ms."""
    with slowed(module_model, 0.02), running(module_model) as server:
        yield server
        server.rest()
