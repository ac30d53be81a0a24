"""The page at /: its files over HTTP, and the page itself in a browser where one is installed."""

import json
import operator
import re
import shutil
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline.engines.profile import MAX_ROWS
from paceline.options import POLICIES
from paceline.runtime.model import Model
from paceline.server import page as package
from paceline.server.settings import Settings
from support.scripted import always, called, engine_of, scripted_model, when
from support.server import Running, running
from support.waiting import PATIENCE
from support.waiting import until as wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATHS = ("/", "/page.css", "/page.js", "/client.js", "/page.svg")
REPEATED = "this is the one and this is the one and this is the one and this"


# -- the files --------------------------------------------------------------------------------


class Tags(HTMLParser):
    """The start tags of a page, and the values that may be chosen of each select."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.choices: dict[str, list[str]] = {}
        self._select = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.append((tag, found))
        if tag == "select":
            self._select = found["id"]
        elif tag == "option":
            self.choices.setdefault(self._select, []).append(found.get("value", "?"))

    def handle_data(self, data: str) -> None:
        chosen = self.choices.get(self._select, [])
        if chosen[-1:] == ["?"]:
            chosen[-1] = data

    def attributes(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture
def index() -> Tags:
    return Tags(files(package).joinpath("index.html").read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", PATHS)
def test_the_files_are_there_and_closed_to_all_else(server: Running, path: str):
    response = server.get(path)
    assert response.status_code == 200
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    # Nothing from elsewhere; a name in SVG is no address that is fetched.
    text = response.text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|//cdn|@import|localStorage|sessionStorage|cookie", text)


def test_the_files_need_no_key_and_the_rest_does(module_model: Model):
    with running(module_model, Settings(api_keys=("key",))) as locked:
        assert [locked.get(path).status_code for path in PATHS] == [200] * len(PATHS)
        assert locked.get("/v1/models").status_code == 401
        assert locked.post("/", {}).status_code in (401, 405)


def test_nothing_is_inline(index: Tags):
    (script,) = index.attributes("script")
    assert script["src"] == "page.js"
    assert not index.attributes("style")
    for tag, attributes in index.tags:
        assert "style" not in attributes, tag
        assert not [name for name in attributes if name.startswith("on")], tag


def test_every_option_of_the_page_is_accepted_by_the_server(index: Tags, server: Running):
    assert index.choices["policy"] == ["", *POLICIES]
    (block,) = [each for each in index.attributes("input") if each["id"] == "block"]
    assert (block["min"], block["max"]) == ("2", str(MAX_ROWS))
    for drafter in index.choices["drafter"][1:]:
        if "table" in drafter:  # which the tiny model has not
            continue
        asked = {"prompt": "a", "max_tokens": 2, "speculation": {"drafter": drafter}}
        assert server.post("/v1/completions", asked).status_code == 200, drafter


def test_every_field_has_its_label(index: Tags):
    labelled = {each["for"] for each in index.attributes("label")}
    fields = [*index.attributes("input"), *index.attributes("select")]
    assert {each["id"] for each in [*fields, *index.attributes("textarea")]} == labelled


def test_a_stream_with_pieces_has_what_the_page_shows(server: Running):
    asked = {
        "messages": [{"role": "user", "content": REPEATED}],
        "max_tokens": 60,
        "temperature": 0,
        "speculation": {"pieces": True, "policy": "fixed"},
    }
    *chunks, done = server.events("/v1/chat/completions", asked)
    assert done == "[DONE]"
    last = chunks[-1]
    about = [chunk["choices"][0]["speculation"] for chunk in chunks]
    assert about == sorted(about, key=operator.itemgetter("steps"))
    assert about[-1] == {
        "steps": last["speculation"]["steps"],
        "drafted": last["timings"]["draft_n"],
        "accepted": last["timings"]["draft_n_accepted"],
    }
    pieces = [piece for chunk in chunks for piece in chunk["choices"][0]["pieces"]]
    assert len(pieces) == last["timings"]["predicted_n"]
    assert 0 < sum(piece["source"] is not None for piece in pieces) <= about[-1]["accepted"]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert "".join(piece["text"] for piece in pieces) == text


# -- in a browser -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_api.sync_playwright() as playwright:
        try:
            made = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except sync_api.Error:
            pytest.skip("no Chromium is installed")
        yield made
        made.close()


@pytest.fixture
def page(browser: "Browser") -> Iterator["Page"]:
    """A page that is not loaded yet; a test in which it complains fails."""
    made = browser.new_page(viewport={"width": 1200, "height": 820})
    made.set_default_timeout(1000 * PATIENCE)
    complaints: list[str] = []

    def heard(message: "ConsoleMessage") -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    made.on("console", heard)
    made.on("pageerror", lambda error: complaints.append(str(error)))
    made.on("requestfailed", lambda request: complaints.append(f"failed: {request.url}"))
    yield made
    # What Stop does, and what the browser says of a request that was refused.
    meant = re.compile("failed: .*/chat/completions|Failed to load resource: .* status of 40[014] ")
    assert not [each for each in complaints if not meant.match(each)]
    made.close()


@pytest.fixture
def slow(module_model: Model) -> Iterator[Running]:
    """A server whose calls take 20 ms each."""
    step = module_model.engine.step

    def later(work: Any) -> Any:
        time.sleep(0.02)
        return step(work)

    module_model.engine.step = later  # type: ignore[method-assign]
    with running(module_model) as made:
        yield made
        made.rest()
    del module_model.engine.step


def until(page: "Page", true: str, value: Any = None) -> None:
    """Wait for what a piece of JavaScript says.

    Playwright's own way has the page evaluate strings, which the page's policy forbids it.
    """
    wait_until(lambda: page.evaluate(true, value))


def ask(
    page: "Page", text: str = REPEATED, tokens: int = 60, temperature: str | None = "0"
) -> None:
    """Ask, greedy unless said otherwise: a sampled answer may end at its first token."""
    page.get_by_label("Longest answer").fill(str(tokens))
    if temperature is not None:
        page.get_by_label("Temperature").fill(temperature)
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def ended(page: "Page", answers: int = 1) -> None:
    """Wait until `answers` answers have ended."""
    until(
        page,
        "count => document.querySelectorAll('.model .note').length === count"
        " && document.getElementById('stop').disabled",
        answers,
    )


def words(page: "Page") -> str:
    return page.locator(".model .words").last.text_content() or ""


def test_an_answer_is_the_one_that_generate_gives_and_is_tinted(page: "Page", server: Running):
    page.goto(server.url)
    until(page, "name => document.title.startsWith(name)", server.server.service.name)
    page.get_by_label("Policy").select_option("fixed")
    page.get_by_label("Temperature").fill("0")
    ask(page)
    ended(page)
    server.rest()
    chat = [{"role": "user", "content": REPEATED}]
    alone = server.model.generate(chat, max_tokens=60, drafter="none")
    assert words(page) == alone.text
    drafted = page.locator(".model .words .drafted").count()
    assert drafted > 0
    assert page.locator(".model .words .own").count() > 0
    accepted, of = re.findall(r"\d+", page.locator("#acceptance").inner_text())[:2]
    assert drafted <= int(accepted) <= int(of)
    assert page.locator("#tokens").inner_text() == str(page.locator(".model .words span").count())
    assert float(page.locator("#speed").inner_text().replace(",", "")) > 0
    assert "accepted" in (page.locator("#status").text_content() or "")


def test_text_and_figures_are_updated_during_an_answer(page: "Page", slow: Running):
    page.goto(slow.url)
    ask(page, tokens=300)
    until(page, "document.querySelectorAll('.model .words span').length > 5")
    assert page.locator("#log").get_attribute("aria-busy") == "true"
    early, figure = words(page), page.locator("#tokens").inner_text()
    until(page, "before => document.getElementById('tokens').innerText !== before", figure)
    assert float(page.locator("#speed").inner_text()) > 0
    page.get_by_role("button", name="Stop").click()
    ended(page)
    assert words(page).startswith(early)
    assert page.locator("#log").get_attribute("aria-busy") == "false"
    assert page.locator(".model .note").inner_text().startswith("Stopped after")


def test_one_of_several_models_is_chosen_and_named(page: "Page", server: Running):
    own = {"id": server.server.service.name, "status": {"value": "loaded"}}
    data = [{"id": "another", "status": {"value": "unloaded"}}, own]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": data}))
    page.goto(server.url)
    choice = page.get_by_label("Model", exact=True)
    until(page, "count => document.querySelectorAll('#choice option').length === count", 2)
    assert choice.input_value() == own["id"]
    assert not page.locator("#model").is_visible()
    with page.expect_request("**/chat/completions") as sent:
        ask(page, tokens=3)
    assert (sent.value.post_data_json or {})["model"] == own["id"]
    ended(page)
    choice.select_option("another")
    with page.expect_request("**/chat/completions") as sent:
        ask(page, tokens=3)
    assert (sent.value.post_data_json or {})["model"] == "another"
    until(page, "document.getElementById('alert').textContent.includes('another')")


def test_calls_of_functions_are_shown_and_answered(page: "Page", tmp_path: Path):
    model = scripted_model(tmp_path, tmp_path, context_length=4096)
    arguments = {"city": "<b>Oslo</b>"}
    rules = [
        when("<tool_response>", "It rains."),
        always("Let me see.\n" + called("weather", arguments)),
    ]
    with running(model) as server:
        engine_of(server).rules = rules
        page.goto(server.url)
        page.get_by_label("Functions").fill("[{")
        ask(page, "How is the weather?", tokens=200)
        until(page, "document.getElementById('alert').textContent.includes('Functions')")
        assert page.get_by_label("Message", exact=True).input_value() == "How is the weather?"
        tool = {"name": "weather", "parameters": {"type": "object"}}
        page.get_by_label("Functions").fill(json.dumps(tool))
        ask(page, "How is the weather?", tokens=200)
        ended(page)
        assert page.locator(".model .call").inner_text() == f"weather({json.dumps(arguments)})"
        assert words(page) == "Let me see."
        result = page.get_by_label("Result of weather")
        result.fill("wet")
        page.get_by_role("button", name="Send").click()
        ended(page, answers=2)
        assert words(page) == "It rains."
        assert "wet" in engine_of(server).prompts[-1]
        assert page.get_by_label("Message", exact=True).count() == 1
        server.rest()


def test_an_empty_temperature_is_not_sent(page: "Page", server: Running):
    page.goto(server.url)
    with page.expect_request("**/chat/completions") as sent:
        ask(page, tokens=3, temperature=None)
    assert "temperature" not in (sent.value.post_data_json or {})
    ended(page)
    page.get_by_label("Temperature").fill("0")
    with page.expect_request("**/chat/completions") as sent:
        ask(page, tokens=3, temperature=None)
    assert (sent.value.post_data_json or {})["temperature"] == 0
    ended(page, answers=2)


def test_stop_cancels_the_request_and_the_chat_continues(page: "Page", slow: Running):
    page.goto(slow.url)
    ask(page, tokens=300)
    until(page, "document.querySelectorAll('.model .words span').length > 5")
    page.get_by_role("button", name="Stop").click()
    slow.rest()
    ask(page, "and", tokens=5)
    ended(page, answers=2)
    assert slow.scheduler.load.submitted == 2


def test_plain_decoding_is_measured_and_gives_the_same_text(page: "Page", server: Running):
    page.goto(server.url)
    page.get_by_label("Temperature").fill("0.9")
    page.get_by_label("Repeat with plain decoding").check()
    before = server.scheduler.load.submitted
    assert page.locator("#session").inner_text() == "No measurement yet."
    ask(page, temperature="0.9")
    ended(page)
    assert server.scheduler.load.submitted == before + 2
    note = page.locator(".model .note").inner_text()
    assert "plain" in note
    assert "the same text" in note
    assert re.search(r"[\d.,]+ times as fast", note)
    assert page.locator("#bars").is_visible()
    assert page.locator("#session").inner_text().startswith("One answer generated both ways:")


def test_the_keyboard_is_enough(page: "Page", slow: Running):
    page.goto(slow.url)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.get_by_label("Message", exact=True).input_value() == "one\ntwo"
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('.model .words span').length > 2")
    page.keyboard.press("Escape")
    ended(page)
    assert page.evaluate("document.activeElement.id") == "message"
    fields = ["plain", "temperature", "most", "drafter", "policy", "block", "tools", "key"]
    for name in ["send", *fields]:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == name
    for name in reversed(["clear", "log", "message", "send", *fields[:-1]]):
        page.keyboard.press("Shift+Tab")
        assert page.evaluate("document.activeElement.id") == name


def test_a_required_key_is_requested_and_not_stored(page: "Page", module_model: Model):
    with running(module_model, Settings(api_keys=("secret",))) as locked:
        page.goto(locked.url)
        until(page, "document.activeElement.id === 'key'")
        assert "API key" in page.locator("#alert").inner_text()
        page.keyboard.type("secret")
        page.keyboard.press("Tab")
        until(page, "document.getElementById('alert').textContent === ''")
        ask(page, tokens=5)
        ended(page)
        stored = "localStorage.length + sessionStorage.length + document.cookie.length"
        assert page.evaluate(stored) == 0
        page.reload()
        assert page.get_by_label("API key").input_value() == ""


def test_an_error_is_shown_and_the_message_is_kept(page: "Page", server: Running):
    page.goto(server.url)
    ask(page, "a " * 2000)
    until(page, "document.getElementById('alert').textContent !== ''")
    assert "context length" in page.locator("#alert").inner_text()
    assert page.get_by_label("Message", exact=True).input_value().startswith("a a")
    assert page.locator("article").count() == 0
    ask(page, "short", tokens=5)
    ended(page)
    assert page.locator("#alert").inner_text() == ""


def test_markup_in_a_text_is_escaped(page: "Page", server: Running):
    page.goto(server.url)
    ask(page, "<img src=x onerror=alert(1)><b>bold</b>", tokens=3)
    ended(page)
    assert page.locator("article b, article img").count() == 0
    assert page.locator(".user .words").inner_text() == "<img src=x onerror=alert(1)><b>bold</b>"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 380])
def test_axe_finds_nothing(page: "Page", server: Running, scheme: Any, width: int):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed"
    )
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 820})
    page.goto(server.url)
    page.get_by_label("Repeat with plain decoding").check()
    ask(page)
    ended(page)
    page.evaluate("document.getElementById('alert').textContent = 'what an error looks like'")
    found = axe.Axe().run(page)
    assert [each["id"] for each in found.response["violations"]] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
