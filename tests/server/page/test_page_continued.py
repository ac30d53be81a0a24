"""Responses that end early and continue, and servers that disappear or change their model."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from paceline.models import resolve
from paceline.runtime.model import Model
from paceline.server.settings import Settings
from support.browser import REPEATED, alert, ask, ended, note, opened, send, until, words
from support.server import Running, running
from support.thinking import TEMPLATES, write_thinking

if TYPE_CHECKING:
    from playwright.sync_api import Page


def test_a_truncated_response_is_marked_and_continues_from_its_tokens(
    page: "Page", server: Running
):
    opened(page, server.url)
    ask(page, tokens=20)
    ended(page)
    assert "cut" in note(page)
    with page.expect_request("**/v1/completions") as request:
        page.get_by_role("button", name="Continue").click()
    until(page, "document.getElementById('stop').hidden")
    server.rest()
    prompt = request.value.post_data_json["prompt"]
    chat = [{"role": "user", "content": REPEATED}]
    begun = server.model.generate(chat, max_tokens=20, drafter="none")
    assert prompt == [*server.model.tokens(chat), *begun.token_ids]
    rest = server.model.generate(prompt, max_tokens=20, drafter="none")
    assert words(page).strip() == (begun.text.rstrip("\ufffd") + rest.text).strip()
    assert page.locator(".model").count() == 1


def thoughts(page: "Page") -> str:
    return page.locator(".model .thought p").last.text_content() or ""


@pytest.fixture(scope="module")
def thinking(
    tiny_model: Model, tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A server whose model never ends its reasoning."""
    path = write_thinking(tmp_path_factory.mktemp("open") / "open.gguf", TEMPLATES["deepseek-r1"])
    with running(Model(resolve(str(path), tiny_cache), tiny_model.engine)) as server:
        yield server


def test_a_response_truncated_in_its_reasoning_continues_seamlessly(
    page: "Page", thinking: Running
):
    opened(page, thinking.url)
    page.get_by_label("Seed").fill("7")
    ask(page, tokens=15, temperature="0.8")
    ended(page)
    assert "cut in its thoughts" in note(page)
    begun = thoughts(page)
    page.get_by_label("Seed").fill("")
    page.reload()
    page.get_by_role("button", name=REPEATED[:20]).first.click()
    page.get_by_role("button", name="Continue").click()
    until(page, "text => document.querySelector('.thought p').textContent !== text", begun)
    ended(page)
    thinking.rest()
    chat = [{"role": "user", "content": REPEATED}]
    whole = thinking.model.generate(
        chat, max_tokens=30, drafter="none", temperature=0.8, seed=7, generation_config="none"
    )
    assert whole.text == ""
    assert thoughts(page) == whole.reasoning
    assert page.get_by_role("button", name="Continue").is_visible()


def test_a_message_to_an_unreachable_server_is_kept_and_resent(page: "Page", module_model: Model):
    with running(module_model) as server:
        opened(page, server.url)
        ask(page, "first", tokens=5)
        ended(page)
    send(page, "second")
    alert(page, "does not respond")
    field = page.get_by_label("Message", exact=True)
    assert field.input_value() == "second"
    with running(module_model, port=server.server.port):
        page.get_by_role("button", name="Send").click()
        ended(page, 2)
        assert page.locator("#alert").inner_text() == ""
    with running(module_model, Settings(name="another"), port=server.server.port):
        send(page, "third")
        alert(page, "goes to another")
        assert field.input_value() == "third"
        page.get_by_role("button", name="Continue").click()
        alert(page, "no longer has")
        ended(page, 2)
        page.get_by_role("button", name="Send").click()
        ended(page, 3)
    with running(module_model, Settings(api_keys=("secret",)), port=server.server.port):
        send(page, "fourth")
        alert(page, "API key")
        assert field.input_value() == "fourth"
        assert page.evaluate("document.activeElement.id") == "key"
    name = server.server.service.name
    assert page.locator(".model h3").all_text_contents() == [name, name, "another"]


def test_a_response_with_a_lost_connection_stays_and_continues(page: "Page", server: Running):
    opened(page, server.url)
    body = server.post(
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": REPEATED}],
            **{"max_tokens": 9, "temperature": 0, "stream": True, "return_token_ids": True},
            "speculation": {"pieces": True},
        },
    ).text.split("\n\n")
    part = "\n\n".join([*body[:-3], ""])
    page.route(
        "**/chat/completions",
        lambda route: route.fulfill(body=part, content_type="text/event-stream"),
    )
    ask(page, tokens=20)
    alert(page, "closed before the end")
    ended(page)
    begun = words(page)
    assert len(begun) > 3
    page.get_by_role("button", name="Continue").click()
    until(page, "text => document.querySelector('.model .words').textContent !== text", begun)
    ended(page)
    assert words(page).startswith(begun.strip().rstrip("\ufffd"))
    assert page.locator("#alert").inner_text() == ""
