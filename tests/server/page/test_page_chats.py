"""Chats in the browser: stored, found, exported and deleted; and files that go with a message."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.browser import REPEATED, alert, ask, ended, note, opened, send, until
from support.scripted import always, engine_of
from support.server import Running

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


@pytest.fixture
def talking(page: "Page", scripted_server: Running) -> "Page":
    """A page with one chat, about rivers."""
    engine_of(scripted_server).rules = [always("The Danube.")]
    opened(page, scripted_server.url, settings=False)
    page.on("dialog", lambda dialog: dialog.accept())
    send(page, "Name a river.")
    ended(page)
    titles(page, ["Name a river."])
    scripted_server.rest()
    return page


def titles(page: "Page", expected: list[str]) -> None:
    """Wait until the list has these chats."""
    until(
        page,
        "titles => JSON.stringify([...document.querySelectorAll('#chats button:first-child')]"
        ".map((chat) => chat.textContent)) === JSON.stringify(titles)",
        expected,
    )


def edit_the_first_question(page: "Page", text: str) -> None:
    page.locator(".user").first.hover()
    page.locator(".user").first.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill(text)
    page.keyboard.press("Enter")


def test_chats_are_found_again_searched_and_deleted(talking: "Page"):
    page = talking
    page.get_by_role("button", name="New chat").click()
    send(page, "Name a hill.")
    ended(page)
    titles(page, ["Name a hill.", "Name a river."])
    page.reload()
    titles(page, ["Name a hill.", "Name a river."])
    page.get_by_label("Search chats").fill("RIVER")
    titles(page, ["Name a river."])
    page.get_by_role("button", name="Name a river.", exact=True).click()
    until(page, "document.querySelector('.model .words')?.innerText === 'The Danube.'")
    assert page.locator(".user .words").text_content() == "Name a river."
    page.get_by_label("Search chats").fill("")
    titles(page, ["Name a hill.", "Name a river."])
    page.get_by_role("button", name="Delete Name a river.").click()
    titles(page, ["Name a hill."])
    assert page.locator("article").count() == 0
    page.get_by_role("button", name="Delete all chats").click()
    titles(page, [])
    page.reload()
    until(page, "document.title.startsWith('scripted')")
    titles(page, [])


def test_a_chat_has_an_address(talking: "Page"):
    page = talking
    address = page.url
    assert "#chat/" in address
    page.reload()
    until(page, "document.querySelector('.model .words')?.innerText === 'The Danube.'")
    assert page.url == address
    page.get_by_role("button", name="New chat").click()
    assert page.locator("article").count() == 0
    assert "#" not in page.url
    page.goto(address)  # the page stays, with another hash
    until(page, "document.querySelectorAll('article').length === 2")
    page.goto(f"{address}0")
    alert(page, "no longer has this chat")
    page.goto(address.partition("#")[0])
    until(page, "document.title.startsWith('scripted')")
    assert page.locator("article").count() == 0


def test_all_chats_are_deleted_after_their_number_is_confirmed(
    page: "Page", scripted_server: Running
):
    asked: list[str] = []
    page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
    engine_of(scripted_server).rules = [always("The Danube.")]
    opened(page, scripted_server.url, settings=False)
    page.get_by_role("button", name="Delete all chats").click()
    for count in (1, 2):
        page.get_by_role("button", name="New chat").click()
        send(page, "Name a river.")
        titles(page, ["Name a river."] * count)
        ended(page)
        with page.expect_event("dialog"):
            page.get_by_role("button", name="Delete all chats").click()
        titles(page, ["Name a river."] * count)
    assert asked == [
        f"Delete {which} in this browser?" for which in ("the only chat", "all 2 chats")
    ]
    scripted_server.rest()


ROWS = ("| river | *sea* |", "|---|:-:|", "| Rhine | **North** |", "| Danube | `Black` |")
TABLE = "\n".join(["Two rivers:", "", *ROWS, "", "So it is."])


@pytest.mark.parametrize("first", [True, False])
def test_a_table_stays_one_under_the_tints_of_its_tokens(
    first: bool, page: "Page", scripted_server: Running
):
    engine_of(scripted_server).rules = [always(TABLE)]
    opened(page, scripted_server.url)
    if first:
        page.get_by_label("Show drafted tokens").check()
    page.get_by_label("Policy").select_option("fixed")
    ask(page, "Which rivers?", tokens=200)
    ended(page)
    page.get_by_label("Show drafted tokens").check()
    until(page, "document.querySelectorAll('.words table td span').length >= 4")
    cells = page.locator(".words :is(th, td)").all_text_contents()
    assert cells == ["river", "sea", "Rhine", "North", "Danube", "Black"]
    kinds = page.evaluate("[...document.querySelectorAll('td span')].map((s) => s.className)")
    assert {*kinds} <= {"own", "drafted"}
    text = page.locator(".model .words").inner_text()
    assert text.startswith("Two rivers:") and text.rstrip().endswith("So it is.")
    assert "|" not in text
    page.get_by_label("Show drafted tokens").uncheck()
    until(page, "document.querySelectorAll('.words table td span').length === 0")
    scripted_server.rest()


def test_an_edited_question_leaves_the_chat_with_its_later_answers(talking: "Page"):
    page = talking
    send(page, "And a lake.")
    ended(page, 2)
    edit_the_first_question(page, "Name a sea.")
    titles(page, ["Name a sea.", "Name a river."])
    ended(page)
    page.get_by_role("button", name="Name a river.", exact=True).click()
    until(page, "document.querySelectorAll('article').length === 4")


def test_an_answer_in_progress_stays_in_its_chat_when_another_is_opened(
    page: "Page", slow: Running
):
    opened(page, slow.url)
    page.get_by_label("Max tokens").fill("300")
    page.get_by_label("Temperature").fill("0")
    send(page, REPEATED)
    until(page, "document.querySelector('.model .words')?.textContent.length > 5")
    page.get_by_role("button", name="New chat").click()
    slow.rest()
    until(page, "document.getElementById('stop').hidden")
    titles(page, [f"{REPEATED[:59]}…"])
    assert page.locator("article").count() == 0
    page.get_by_role("button", name=REPEATED[:20]).first.click()
    until(page, "document.querySelector('.model .words')?.textContent.length > 5")
    assert note(page).startswith("Stopped after")
    assert page.get_by_role("button", name="Continue").is_visible()


def test_a_chat_is_exported(talking: "Page", tmp_path: Path):
    page = talking
    for name in ("Export this chat as Markdown", "Export this chat as JSON", "Export all chats"):
        with page.expect_download() as download:
            page.get_by_role("button", name=name).click()
        download.value.save_as(tmp_path / download.value.suggested_filename)
    text = (tmp_path / "Name-a-river.md").read_text(encoding="utf-8")
    assert text == "# Name a river.\n\n## You\n\nName a river.\n\n## scripted\n\nThe Danube.\n"
    chat = json.loads((tmp_path / "Name-a-river.json").read_text(encoding="utf-8"))
    assert [message["content"] for message in chat["messages"]] == ["Name a river.", "The Danube."]
    assert json.loads((tmp_path / "chats.json").read_text(encoding="utf-8")) == [chat]


def titled(page: "Page", title: str) -> "Locator":
    return page.get_by_role("button", name=title, exact=True)


def test_a_chat_is_renamed_and_keeps_its_title(talking: "Page"):
    page = talking
    page.get_by_role("button", name="Rename Name a river.").focus()
    page.keyboard.press("Enter")
    page.keyboard.type("  Rivers ")
    page.keyboard.press("Enter")
    titles(page, ["Rivers"])
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Rename Rivers"
    send(page, "And a lake.")
    ended(page, 2)
    edit_the_first_question(page, "Name a sea.")
    titles(page, ["Rivers", "Rivers"])
    ended(page)
    page.reload()
    titles(page, ["Rivers", "Rivers"])


def test_exported_chats_are_imported_once(talking: "Page", tmp_path: Path):
    page = talking
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all chats").click()
    download.value.save_as(tmp_path / "chats.json")
    picker = page.locator("#import-picker")
    page.get_by_role("button", name="New chat").click()
    picker.set_input_files(tmp_path / "chats.json")
    until(page, "document.querySelector('.model .words')?.innerText === 'The Danube.'")
    titles(page, ["Name a river."])
    page.get_by_role("button", name="Delete all chats").click()
    titles(page, [])
    picker.set_input_files(tmp_path / "chats.json")
    titles(page, ["Name a river."])
    until(page, "document.querySelector('.model .words')?.innerText === 'The Danube.'")
    page.reload()
    titled(page, "Name a river.").click()
    send(page, "And a lake.")
    ended(page, 2)
    assert page.locator(".user .words").all_text_contents() == ["Name a river.", "And a lake."]


def test_a_damaged_or_foreign_file_is_not_imported(talking: "Page"):
    page = talking
    chat = '{"title": "a", "changed": "2026-01-01", "messages": [{"role": "user", "content": %s}]}'
    texts = {
        "cut": '[{"title": "cut off", "mess',
        "foreign": '{"openai": []}',
        "number": chat % "1",
        "second": json.dumps([json.loads(chat % '"b"'), json.loads(chat % "null")]),
    }
    for name, text in texts.items():
        file = {"name": name, "mimeType": "application/json", "buffer": text.encode()}
        page.locator("#import-picker").set_input_files([file])
        alert(page, f"{name} is not imported")
    titles(page, ["Name a river."])
    assert page.locator("article").count() == 2


def test_drafted_tokens_are_tinted_after_a_reload(page: "Page", server: Running):
    opened(page, server.url)
    page.get_by_label("Show drafted tokens").check()
    page.get_by_label("Policy").select_option("fixed")
    ask(page)
    ended(page)
    spans = "[...document.querySelectorAll('.model .words span')].map((s) => s.outerHTML)"
    before = page.evaluate(spans)
    assert any("drafted by" in span for span in before)
    page.reload()
    titled(page, f"{REPEATED[:59]}…").click()
    until(page, "document.querySelectorAll('.model .words .drafted').length > 0")
    assert page.evaluate(spans) == before


def test_a_full_storage_loses_no_message(talking: "Page"):
    page = talking
    page.evaluate(
        """() => { IDBObjectStore.prototype.put = () => {
            throw new DOMException("full", "QuotaExceededError");
        }; }"""
    )
    send(page, "And another.")
    ended(page, 2)
    alert(page, "storage is full")
    assert page.locator(".user .words").all_text_contents() == ["Name a river.", "And another."]


def test_a_text_file_goes_with_a_message_and_another_is_refused(
    talking: "Page", scripted_server: Running
):
    page = talking
    picker = page.locator("#picker")
    picker.set_input_files(
        [
            {"name": "notes.md", "mimeType": "", "buffer": "a ``` fence, ü".encode()},
            {"name": "photo.png", "mimeType": "image/png", "buffer": b"\x89PNG\x00\xff"},
        ]
    )
    alert(page, "photo.png is not text")
    assert page.locator("#files li").count() == 1
    page.evaluate(
        """() => {
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File(["dropped text"], "dropped.txt"));
            document.body.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true }));
        }"""
    )
    until(page, "document.querySelectorAll('#files li').length === 2")
    send(page, "Read this.")
    ended(page, 2)
    prompt = engine_of(scripted_server).prompts[-1]
    assert "notes.md:\n````\na ``` fence, ü\n````" in prompt
    assert "dropped.txt:\n```\ndropped text\n```\n\nRead this." in prompt
    assert page.locator("#files li").count() == 0
    assert page.locator(".user .file summary").all_inner_texts() == ["notes.md", "dropped.txt"]
    scripted_server.rest()
