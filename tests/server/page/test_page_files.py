"""The page at /: its files over HTTP, their content, and the API that it uses."""

import operator
import re
from importlib.resources import files
from pathlib import Path

import pytest

from paceline.engines.costs import MAX_ROWS
from paceline.options import POLICIES
from paceline.runtime.model import Model
from paceline.server import page as package
from paceline.server.settings import Settings
from support.server import Running, running

FOLDER = Path(str(files(package)))
OWN = [*map(operator.attrgetter("name"), sorted(FOLDER.glob("*.[cjs]*")))]
PATHS = ("/", *(f"/{name}" for name in OWN), "/vendor/marked.js", "/vendor/purify.js")
FIRST_PAINT = 100_000
"""Bytes that a browser loads for the first paint, compressed."""


@pytest.mark.parametrize("path", PATHS)
def test_the_page_files_are_served_with_a_strict_security_policy(server: Running, path: str):
    response = server.get(path)
    assert response.status_code == 200
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert server.get(path, headers={"if-none-match": response.headers["etag"]}).status_code == 304
    if not path.startswith("/vendor/"):
        # Nothing from other hosts; the name in SVG is not downloaded.
        text = response.text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//cdn|@import url|localStorage|cookie", text)


def test_the_first_paint_is_small(server: Running):
    sizes = [int(server.get(path).headers["content-length"]) for path in PATHS]
    assert sum(sizes) < FIRST_PAINT


def test_a_file_is_identical_when_compressed(server: Running):
    plain = server.get("/page.js", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert (
        server.get("/page.js").content == plain.content == FOLDER.joinpath("page.js").read_bytes()
    )


def test_every_library_has_its_license_and_version():
    licences = FOLDER.joinpath("vendor", "LICENSES.txt").read_text(encoding="utf-8")
    for path in FOLDER.glob("vendor/*.js"):
        (version,) = re.findall(rf"{path.name} .*?(\d+\.\d+\.\d+)", licences)
        assert version in path.read_text(encoding="utf-8")[:400]
    (version,) = re.findall(r"highlight/ .*?(\d+\.\d+\.\d+)", licences)
    assert version in FOLDER.joinpath("vendor/highlight/core.js").read_text(encoding="utf-8")[:400]


def test_the_page_files_need_no_key_but_everything_else_does(module_model: Model):
    with running(module_model, Settings(api_keys=("key",))) as locked:
        assert [locked.get(path).status_code for path in PATHS] == [200] * len(PATHS)
        assert locked.get("/v1/models").status_code == 401
        assert locked.post("/", {}).status_code in (401, 405)


def test_every_option_of_the_page_is_accepted_by_the_server(server: Running):
    text = FOLDER.joinpath("index.html").read_text(encoding="utf-8")
    choices = {
        name: re.findall(r"<option(?: value=\"([^\"]*)\")?[^>]*>([^<]*)", options)
        for name, options in re.findall(r'<select id="(\w+)"(.*?)</select>', text, re.DOTALL)
    }
    assert [shown for value, shown in choices["policy"]][1:] == [*POLICIES]
    (block,) = re.findall(r'<input id="block"[^>]*>', text)
    assert 'min="2"' in block
    assert f'max="{MAX_ROWS}"' in block
    for value, shown in choices["drafter"][1:]:
        drafter = value or shown
        if "table" not in drafter:  # which the tiny model has not
            asked = {"prompt": "a", "max_tokens": 2, "speculation": {"drafter": drafter}}
            assert server.post("/v1/completions", asked).status_code == 200, drafter
