"""The page at /: its files over HTTP, what is in them, and the API that it uses."""

import operator
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest

from paceline.engines.costs import MAX_ROWS
from paceline.options import POLICIES
from paceline.runtime.model import Model
from paceline.server import page as package
from paceline.server.settings import Settings
from support.browser import REPEATED
from support.server import Running, running

FOLDER = Path(str(files(package)))
OWN = [*map(operator.attrgetter("name"), sorted(FOLDER.glob("*.[cjs]*")))]
PATHS = ("/", *(f"/{name}" for name in OWN), "/vendor/marked.js", "/vendor/purify.js")
FIRST_PAINT = 100_000
"""Bytes that a browser loads for the first paint, compressed."""


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
    assert server.get(path, headers={"if-none-match": response.headers["etag"]}).status_code == 304
    if not path.startswith("/vendor/"):
        # Nothing from elsewhere; a name in SVG is no address that is fetched.
        text = response.text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//cdn|@import url|localStorage|cookie", text)


def test_the_first_paint_is_small(server: Running):
    sizes = [int(server.get(path).headers["content-length"]) for path in PATHS]
    assert sum(sizes) < FIRST_PAINT


def test_a_file_is_the_same_compressed(server: Running):
    plain = server.get("/page.js", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert (
        server.get("/page.js").content == plain.content == FOLDER.joinpath("page.js").read_bytes()
    )


def test_every_library_has_its_licence_and_version():
    licences = FOLDER.joinpath("vendor", "LICENSES.txt").read_text(encoding="utf-8")
    for path in FOLDER.glob("vendor/*.js"):
        (version,) = re.findall(rf"{path.name} .*?(\d+\.\d+\.\d+)", licences)
        assert version in path.read_text(encoding="utf-8")[:400]
    (version,) = re.findall(r"highlight/ .*?(\d+\.\d+\.\d+)", licences)
    assert version in FOLDER.joinpath("vendor/highlight/core.js").read_text(encoding="utf-8")[:400]


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
    labelled = {label["for"] for label in index.attributes("label")}
    fields = [*index.attributes("input"), *index.attributes("select")]
    fields = [field for field in [*fields, *index.attributes("textarea")] if "hidden" not in field]
    assert {field["id"] for field in fields} == labelled


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
