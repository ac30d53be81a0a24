"""Markdown on the page: shown as elements, and harmless whatever a model writes."""

from typing import TYPE_CHECKING

from support.browser import ended, opened, send, until, words
from support.scripted import always, engine_of
from support.server import Running

if TYPE_CHECKING:
    from playwright.sync_api import Page

SHOWN = """# Title

Some **bold** text, `code` and a [link](https://example.org/).

- one
- two

| a | b |
|---|---|
| 1 | 2 |

```python
def f(): return 1
```
"""

HOSTILE = """<img src=x onerror=alert(1)><b>bold</b> <script>alert(2)</script>

[click](javascript:alert(3)) ![picture](https://example.org/a.png)
[data](data:text/html,<script>alert(4)</script>)

<style>body { display: none }</style> <a href="https://example.org" onclick="alert(5)">a</a>

```"><img/src=x/onerror=alert(6)>
<img src=x onerror=alert(7)>
```

`<svg onload=alert(8)>` <https://example.org/"onmouseover=alert(9)>
"""


def shown(page: "Page", server: Running, answer: str) -> None:
    engine_of(server).rules = [always(answer)]
    opened(page, server.url, settings=False)
    send(page, "Show it.")
    ended(page)
    server.rest()


def test_markdown_becomes_elements_and_code_is_highlighted(page: "Page", scripted_server: Running):
    shown(page, scripted_server, SHOWN)
    answer = page.locator(".model .words")
    assert answer.locator("h4").inner_text() == "Title"
    assert answer.locator("strong").inner_text() == "bold"
    assert answer.locator("li").all_inner_texts() == ["one", "two"]
    assert answer.locator("td").all_inner_texts() == ["1", "2"]
    link = answer.locator("a")
    assert link.get_attribute("href") == "https://example.org/"
    assert "noopener" in (link.get_attribute("rel") or "")
    until(page, "document.querySelector('.hljs-keyword')?.textContent === 'def'")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer.get_by_role("button", name="Copy the code").click()
    until(page, "navigator.clipboard.readText().then((text) => text === 'def f(): return 1')")
    page.locator(".model .actions").get_by_role("button", name="Copy").click()
    until(page, "text => navigator.clipboard.readText().then((read) => read === text)", SHOWN)


def test_reasoning_is_collapsed_separately_from_the_response(
    page: "Page", scripted_server: Running
):
    shown(page, scripted_server, "<think>\nA **river**.\n</think>\n\nThe Rhine.")
    assert words(page).strip() == "The Rhine."
    fold = page.locator(".model details")
    assert fold.get_attribute("open") is None
    fold.locator("summary").click()
    assert fold.locator("p").inner_text().strip() == "A **river**."


def test_model_and_user_markup_is_escaped(page: "Page", scripted_server: Running):
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    shown(page, scripted_server, HOSTILE)
    for selector in ("img", "b", "script", "style", "svg", "[onclick]", "[onerror]"):
        assert page.locator(f"article {selector}").count() == 0, selector
    links = page.locator("article a").evaluate_all("all => all.map((a) => a.getAttribute('href'))")
    assert all(link is None or link.startswith("https://example.org") for link in links)
    assert "<b>bold</b>" in page.locator(".model .words").inner_text()
    send(page, "<img src=x onerror=alert(1)><b>bold</b>")
    ended(page, 2)
    question = page.locator(".user .words").last
    assert question.inner_text() == "<img src=x onerror=alert(1)><b>bold</b>"
    assert dialogs == []


def test_incremental_rendering_gives_the_elements_of_the_whole_text(
    page: "Page", scripted_server: Running
):
    opened(page, scripted_server.url, settings=False)
    same = page.evaluate(
        """async (text) => {
            const { Markdown } = await import("./markdown.js");
            const [parts, whole] = [document.createElement("div"), document.createElement("div")];
            const growing = new Markdown(parts);
            for (let end = 0; end <= text.length; end += 3) growing.show(text.slice(0, end), false);
            growing.show(text, true);
            new Markdown(whole).show(text, true);
            await new Promise((resolve) => setTimeout(resolve, 300));
            return [parts.innerHTML, whole.innerHTML];
        }""",
        SHOWN + HOSTILE + SHOWN,
    )
    assert same[0] == same[1]
