"""A response on the page: requested, shown, stopped, continued, and regenerated."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from paceline.runtime.batching import batch
from paceline.runtime.model import Model
from paceline.server.api import endpoint
from paceline.server.settings import Settings
from support.browser import REPEATED, alert, ask, ended, note, opened, send, until, words
from support.other_clients import slowed
from support.scripted import always, called, engine_of, scripted_model, when
from support.server import Running, running

if TYPE_CHECKING:
    from playwright.sync_api import Page


def requested(page: "Page", text: str, tokens: str = "3") -> dict[str, object]:
    """Return the body of the request for a response."""
    answers = page.locator(".model .note").count()
    with page.expect_request("**/chat/completions") as request:
        ask(page, text, tokens=tokens, temperature=None)
    ended(page, answers + 1)
    body: dict[str, object] = request.value.post_data_json
    return body


def test_a_page_response_matches_generate_and_is_tinted(page: "Page", server: Running):
    opened(page, server.url)
    until(page, "name => document.title.startsWith(name)", server.server.service.name)
    page.get_by_label("Show drafted tokens").check()
    page.get_by_label("Policy").select_option("fixed")
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
    page.get_by_label("Show drafted tokens").uncheck()
    assert page.locator(".model .words .drafted").count() == 0
    page.get_by_label("Show drafted tokens").check()
    assert page.locator(".model .words .drafted").count() == drafted
    spans = "[...document.querySelectorAll('.model .words span')].map((s) => s.outerHTML)"
    before = page.evaluate(spans)
    assert any("drafted by" in span for span in before)
    page.reload()
    page.get_by_role("button", name=f"{REPEATED[:59]}…", exact=True).click()
    until(page, f"before => JSON.stringify({spans}) === JSON.stringify(before)", before)


def test_prefill_progress_of_a_long_prompt_is_shown(
    page: "Page", slow: Running, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(endpoint, "_PROGRESS_SECONDS", 0.05)
    monkeypatch.setattr(batch, "_PREFILL_ROWS", 8)
    opened(page, slow.url)
    ask(page, REPEATED * 4, tokens=2)
    until(
        page,
        r"/^Reading the prompt: \d+ of \d+ tokens/.test("
        "document.querySelector('.model .note')?.textContent)",
    )
    ended(page)
    assert "Reading" not in note(page)


def test_a_model_is_selected_from_several_and_sent(page: "Page", server: Running):
    own = {"id": server.server.service.name, "status": {"value": "loaded"}}
    data = [{"id": "another", "status": {"value": "unloaded"}}, own]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": data}))
    opened(page, server.url)
    choice = page.get_by_label("Model", exact=True)
    until(page, "count => document.querySelectorAll('#choice option').length === count", 2)
    assert choice.input_value() == own["id"]
    assert not page.locator("#model").is_visible()
    assert requested(page, "a")["model"] == own["id"]
    choice.select_option("another")
    with page.expect_request("**/chat/completions") as request:
        ask(page, tokens=3)
    assert (request.value.post_data_json or {})["model"] == "another"
    alert(page, "another")


def test_function_calls_are_shown_and_answered(page: "Page", tmp_path: Path):
    model = scripted_model(tmp_path, tmp_path, context_length=4096)
    arguments = {"city": "<b>Oslo</b>"}
    rules = [
        when("<tool_response>", "It rains."),
        always("Let me see.\n" + called("weather", arguments)),
    ]
    with running(model) as server:
        engine_of(server).rules = rules
        opened(page, server.url)
        page.get_by_label("Functions").fill("[{")
        ask(page, "How is the weather?", tokens=200)
        alert(page, "Functions")
        assert page.get_by_label("Message", exact=True).input_value() == "How is the weather?"
        tool = {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}
        page.get_by_label("Functions").fill(json.dumps(tool))
        ask(page, "How is the weather?", tokens=200)
        ended(page)
        assert page.locator(".model .call").inner_text() == f"weather({json.dumps(arguments)})"
        assert words(page).strip() == "Let me see."
        page.get_by_label("Result of weather").fill("wet")
        page.get_by_role("button", name="Send").click()
        ended(page, answers=2)
        assert words(page).strip() == "It rains."
        assert "wet" in engine_of(server).prompts[-1]
        assert page.get_by_label("Message", exact=True).count() == 1
        server.rest()


LABELS = ("Temperature", "Top k", "Max tokens")


def test_the_api_link_works(page: "Page", module_model: Model):
    with running(module_model, root_path="/m/x", api_keys=("secret",)) as locked:
        page.goto(f"{locked.url}/m/x/")  # the panel is open, as the page needs the key
        page.get_by_role("link", name="API reference").click()
        until(page, "document.body.innerText.includes('/v1/chat/completions')")
        assert page.url == f"{locked.url}/m/x/openapi.json"


def test_settings_are_sent_if_filled_in_and_stay_in_the_browser(page: "Page", server: Running):
    opened(page, server.url)
    body = requested(page, "a", tokens="")
    assert body["max_tokens"] == 256  # the server's: half of the context
    placeholders = [page.get_by_label(label).get_attribute("placeholder") for label in LABELS]
    assert placeholders == ["Default (1)", "Default (0)", "Default (256)"]
    assert not {"temperature", "top_p", "min_p", "reasoning_effort"} & body.keys()
    page.get_by_role("button", name="New chat").click()  # the answer may have filled the context
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Top p").fill("0.5")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Temperature").fill("0.25")
    body = requested(page, "b")
    assert (body["top_p"], body["temperature"], body["seed"]) == (0.5, 0.25, 7)
    assert isinstance(body["messages"], list)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    until(page, "document.getElementById('panel').hidden === false")
    page.reload()
    until(page, "document.getElementById('seed').value === '7'")
    assert page.get_by_label("System prompt").input_value() == "Be brief."


def test_plain_decoding_is_measured_with_the_same_text(page: "Page", server: Running):
    opened(page, server.url)
    page.get_by_label("Repeat with plain decoding").check()
    before = server.scheduler.load.submitted
    assert page.locator("#session").inner_text() == "No measurement yet."
    ask(page, temperature="0.9")
    ended(page)
    until(page, "document.querySelector('.model .note').textContent.includes('the same text')")
    assert server.scheduler.load.submitted == before + 2
    assert re.search(r"plain .*[\d.,]+ times as fast", note(page))
    assert page.locator("#bars").is_visible()
    assert page.locator("#session").inner_text().startswith("One answer generated both ways:")


def test_responses_are_regenerated_and_messages_edited_and_deleted(
    page: "Page", scripted_server: Running
):
    engine = engine_of(scripted_server)
    engine.rules = [when("second", "Two."), always("One.")]
    opened(page, scripted_server.url)
    send(page, "first")
    ended(page)
    engine.rules = [when("second", "Two."), always("One again.")]
    page.get_by_role("button", name="Regenerate").click()
    until(page, "document.querySelector('.model .words').innerText === 'One again.'")
    ended(page)
    page.locator(".user").hover()
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("second")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.model .words')?.innerText === 'Two.'")
    ended(page)
    assert page.locator(".user .words").all_text_contents() == ["second"]
    assert "first" not in engine.prompts[-1]
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator(".user").hover()
    page.locator(".user").get_by_role("button", name="Delete").click()
    assert page.locator("article").count() == 0
    scripted_server.rest()


def test_the_page_works_with_the_keyboard_alone(page: "Page", scripted_server: Running):
    engine_of(scripted_server).rules = [always("word " * 200)]  # no code, which Tab would reach
    opened(page, scripted_server.url, settings=False)
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.get_by_label("Message", exact=True).input_value() == "one\ntwo"
    with slowed(scripted_server.model, 0.02):
        page.keyboard.press("Enter")
        until(page, "document.querySelector('.model .words')?.textContent.length > 2")
        page.keyboard.press("Escape")
        ended(page)
    assert page.evaluate("document.activeElement.id") == "message"
    reached: list[str] = []
    name_of = "(({ id, innerText }) => id || innerText)(document.activeElement)"
    while "show-history" not in reached:
        page.keyboard.press("Shift+Tab")
        reached.append(page.evaluate(name_of))
        assert len(reached) < 20
    # The buttons of the two messages, the log, the list of chats, and the head.
    expected = ["Continue", "Regenerate", "Copy", "Delete", "Edit", "Copy", "log"]
    expected += ["delete-all", "import", "export-all", "export-json", "export-markdown"]
    assert reached[: len(expected)] == expected
    assert reached[-4:] == ["search", "show-panel", "new", "show-history"]
    scripted_server.rest()


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
        page.reload()
        until(page, "document.getElementById('most').value === '5'")  # which is stored
        assert page.get_by_label("API key").input_value() == ""
        locked.rest()


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (1200, "dark"), (2560, "light")])
def test_the_page_is_accessible_and_send_stays_on_screen(
    page: "Page", scripted_server: Running, width: int, scheme: str
):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed"
    )
    code = '```python\ndef f(x): return "a" * 80, 1  # comment\n```'
    text = f"# One\n\n{code}\n\n| a | b |\n|---|---|\n| `1` | [2](http://x.test) |\n\n" * 3
    engine_of(scripted_server).rules = [always(text)]
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    page.set_viewport_size({"width": width, "height": 740})
    opened(page, scripted_server.url, settings=False)
    send(page, "Show me all.")
    ended(page)
    until(page, "document.querySelectorAll('.hljs-keyword').length > 2")
    assert page.evaluate("document.getElementById('send').getBoundingClientRect().bottom") <= 740
    page.evaluate("document.getElementById('alert').textContent = 'what an error looks like'")
    checks = axe.Axe()
    for opener in (None, "Settings"):
        if opener:
            page.get_by_role("button", name=opener).click()
            page.get_by_label("Show drafted tokens").check()
        violations = checks.run(page).response["violations"]
        assert [violation["id"] for violation in violations] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    scripted_server.rest()
