"""Chats in the browser: stored, searched, exported and deleted; and attached files."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.browser import REPEATED, alert, ask, ended, note, opened, send, until
from support.scripted import always, engine_of
from support.server import Running

if TYPE_CHECKING:
    from playwright.sync_api import Page


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


def test_chats_are_restored_searched_and_deleted(talking: "Page"):
    talking.get_by_role("button", name="New chat").click()
    send(talking, "Name a hill.")
    ended(talking)
    titles(talking, ["Name a hill.", "Name a river."])
    talking.reload()
    titles(talking, ["Name a hill.", "Name a river."])
    talking.get_by_label("Search chats").fill("RIVER")
    titles(talking, ["Name a river."])
    talking.get_by_role("button", name="Name a river.", exact=True).click()
    until(talking, "document.querySelector('.model .words')?.innerText === 'The Danube.'")
    assert talking.locator(".user .words").text_content() == "Name a river."
    talking.get_by_label("Search chats").fill("")
    titles(talking, ["Name a hill.", "Name a river."])
    talking.get_by_role("button", name="Delete Name a river.").click()
    titles(talking, ["Name a hill."])
    assert talking.locator("article").count() == 0
    talking.get_by_role("button", name="Delete all chats").click()
    titles(talking, [])
    talking.reload()
    until(talking, "document.title.startsWith('scripted')")
    titles(talking, [])


def test_a_chat_has_a_url(talking: "Page"):
    address = talking.url
    assert "#chat/" in address
    talking.reload()
    until(talking, "document.querySelector('.model .words')?.innerText === 'The Danube.'")
    assert talking.url == address
    talking.get_by_role("button", name="New chat").click()
    assert talking.locator("article").count() == 0
    assert "#" not in talking.url
    talking.goto(address)  # the page stays, with another hash
    until(talking, "document.querySelectorAll('article').length === 2")
    talking.goto(f"{address}0")
    alert(talking, "no longer has this chat")
    talking.goto(address.partition("#")[0])
    until(talking, "document.title.startsWith('scripted')")
    assert talking.locator("article").count() == 0


def test_all_chats_are_deleted_after_confirming_their_number(
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
def test_a_tinted_table_stays_a_table(first: bool, page: "Page", scripted_server: Running):
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


def test_a_response_in_progress_stays_in_its_chat(page: "Page", slow: Running):
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


def test_a_chat_is_renamed_and_editing_a_question_branches_it(talking: "Page"):
    talking.get_by_role("button", name="Rename Name a river.").focus()
    talking.keyboard.press("Enter")
    talking.keyboard.type("  Rivers ")
    talking.keyboard.press("Enter")
    titles(talking, ["Rivers"])
    assert talking.evaluate("document.activeElement.getAttribute('aria-label')") == "Rename Rivers"
    send(talking, "And a lake.")
    ended(talking, 2)
    talking.locator(".user").first.hover()
    talking.locator(".user").first.get_by_role("button", name="Edit").click()
    talking.get_by_label("Edited message").fill("Name a sea.")
    talking.keyboard.press("Enter")
    titles(talking, ["Rivers", "Rivers"])
    ended(talking)
    talking.reload()
    titles(talking, ["Rivers", "Rivers"])
    talking.get_by_role("button", name="Rivers", exact=True).last.click()
    until(talking, "document.querySelectorAll('article').length === 4")


def test_chats_are_exported_and_imported_once(talking: "Page", tmp_path: Path):
    for name in ("Export this chat as Markdown", "Export this chat as JSON", "Export all chats"):
        with talking.expect_download() as download:
            talking.get_by_role("button", name=name).click()
        download.value.save_as(tmp_path / download.value.suggested_filename)
    text = (tmp_path / "Name-a-river.md").read_text(encoding="utf-8")
    assert text == "# Name a river.\n\n## You\n\nName a river.\n\n## scripted\n\nThe Danube.\n"
    chat = json.loads((tmp_path / "Name-a-river.json").read_text(encoding="utf-8"))
    assert [message["content"] for message in chat["messages"]] == ["Name a river.", "The Danube."]
    assert json.loads((tmp_path / "chats.json").read_text(encoding="utf-8")) == [chat]
    picker = talking.locator("#import-picker")
    talking.get_by_role("button", name="New chat").click()
    picker.set_input_files(tmp_path / "chats.json")
    until(talking, "document.querySelector('.model .words')?.innerText === 'The Danube.'")
    titles(talking, ["Name a river."])
    talking.get_by_role("button", name="Delete all chats").click()
    titles(talking, [])
    picker.set_input_files(tmp_path / "chats.json")
    titles(talking, ["Name a river."])
    until(talking, "document.querySelector('.model .words')?.innerText === 'The Danube.'")
    talking.reload()
    talking.get_by_role("button", name="Name a river.", exact=True).click()
    send(talking, "And a lake.")
    ended(talking, 2)
    assert talking.locator(".user .words").all_text_contents() == ["Name a river.", "And a lake."]


def test_a_corrupt_or_foreign_file_is_not_imported(talking: "Page"):
    chat = '{"title": "a", "changed": "2026-01-01", "messages": [{"role": "user", "content": %s}]}'
    texts = {
        "cut": '[{"title": "cut off", "mess',
        "foreign": '{"openai": []}',
        "number": chat % "1",
        "second": json.dumps([json.loads(chat % '"b"'), json.loads(chat % "null")]),
    }
    for name, text in texts.items():
        file = {"name": name, "mimeType": "application/json", "buffer": text.encode()}
        talking.locator("#import-picker").set_input_files([file])
        alert(talking, f"{name} is not imported")
    titles(talking, ["Name a river."])
    assert talking.locator("article").count() == 2


def test_full_browser_storage_loses_no_message(talking: "Page"):
    talking.evaluate(
        """() => { IDBObjectStore.prototype.put = () => {
            throw new DOMException("full", "QuotaExceededError");
        }; }"""
    )
    send(talking, "And another.")
    ended(talking, 2)
    alert(talking, "storage is full")
    assert talking.locator(".user .words").all_text_contents() == ["Name a river.", "And another."]


def test_a_text_file_is_attached_and_other_files_are_rejected(
    talking: "Page", scripted_server: Running
):
    picker = talking.locator("#picker")
    picker.set_input_files(
        [
            {"name": "notes.md", "mimeType": "", "buffer": "a ``` fence, ü".encode()},
            {"name": "photo.png", "mimeType": "image/png", "buffer": b"\x89PNG\x00\xff"},
        ]
    )
    alert(talking, "photo.png is not text")
    assert talking.locator("#files li").count() == 1
    talking.evaluate(
        """() => {
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File(["dropped text"], "dropped.txt"));
            document.body.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true }));
        }"""
    )
    until(talking, "document.querySelectorAll('#files li').length === 2")
    send(talking, "Read this.")
    ended(talking, 2)
    prompt = engine_of(scripted_server).prompts[-1]
    assert "notes.md:\n````\na ``` fence, ü\n````" in prompt
    assert "dropped.txt:\n```\ndropped text\n```\n\nRead this." in prompt
    assert talking.locator("#files li").count() == 0
    assert talking.locator(".user .file summary").all_inner_texts() == ["notes.md", "dropped.txt"]
    scripted_server.rest()
