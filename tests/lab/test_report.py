"""The page and the pictures: the same bytes every time, whole in themselves, and safe."""

import builtins
import json
import re
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from paceline.cli.app import main
from paceline.errors import InvalidRequest, MissingExtra
from paceline.storage.report import json_file
from paceline_lab.bench.record import Row
from paceline_lab.report.charts import record_charts
from paceline_lab.report.files import read_record, write_report
from support.process import python
from support.results import BLOCKS, RUN, SWEEP

VOID = {"meta", "img"}


class Page(HTMLParser):
    """A page whose tags are all closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture
def results(tmp_path: Path) -> list[Path]:
    records = {"run": RUN, "sweep": SWEEP, "blocks": BLOCKS}
    for name, record in records.items():
        (tmp_path / f"{name}.json").write_bytes(json_file(record.as_dict()))
    return [tmp_path / f"{name}.json" for name in records]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_reports_are_reproducible_byte_for_byte(results: Sequence[Path], tmp_path: Path):
    results = [results[0], results[2]]
    written = write_report(results, tmp_path / "one")
    assert written[0] == tmp_path / "one" / "index.html"
    assert {path.name for path in written} == content(tmp_path / "one").keys()
    # By somebody else, with other settings of matplotlib, another hash seed and another folder.
    (tmp_path / "matplotlibrc").write_text("font.size: 30\nsavefig.dpi: 40\naxes.grid: True\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    copies = [elsewhere / path.name for path in results]
    for path, copy in zip(results, copies, strict=True):
        copy.write_bytes(path.read_bytes())
    environment = {"MATPLOTLIBRC": str(tmp_path / "matplotlibrc"), "PYTHONHASHSEED": "7"}
    words = ["bench", "report", *(copy.name for copy in copies), "--output", "out"]
    python("-m", "paceline", *words, cwd=elsewhere, env=environment)
    assert content(elsewhere / "out") == content(tmp_path / "one")


def test_the_report_page_is_self_contained(results: Sequence[Path], tmp_path: Path):
    write_report(results, tmp_path / "out")
    page = Page((tmp_path / "out/index.html").read_text(encoding="utf-8"))
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "iframe", "object"})
    pictures = page.all("img")
    for attributes in pictures:
        source = attributes["src"] or ""
        assert source.startswith("data:image/svg+xml;base64,")
        root = ElementTree.fromstring(b64decode(source.partition(",")[2]))
        assert root.tag.endswith("svg")
        assert len(attributes["alt"] or "") > 20
    # A table for every picture, one with all rows of each result, and the run's groups by drafter.
    groups = len(RUN.contenders) - 1
    assert len(page.all("table")) == len(pictures) + len(results) + groups
    assert len(page.all("figure")) == len(pictures)
    assert len(pictures) == sum(len(record_charts(read_record(path))) for path in results)
    assert all(each["scope"] in ("col", "row") for each in page.all("th"))
    links = [each["href"] for each in page.all("a")]
    anchors = [each["id"] for each in page.all("h2")]
    assert links == [f"#{anchor}" for anchor in anchors]
    assert page.all("html") == [{"lang": "en"}]


def test_text_from_a_result_is_escaped(tmp_path: Path):
    name = "<script>alert('x')</script> & \"co\""
    rows = [replace(row, case=name, kind=name, contender=name) for row in RUN.rows[:1]]
    (tmp_path / "x.json").write_bytes(json_file(replace(RUN, rows=rows, command=name).as_dict()))
    write_report([tmp_path / "x.json"], tmp_path / "out")
    page = Page((tmp_path / "out/index.html").read_text(encoding="utf-8"))
    assert not page.all("script")
    assert page.text.count(name) >= 2


def test_text_from_a_result_cannot_change_the_output_path(tmp_path: Path):
    rows = [Row(str(at), "k", "x", {"ratio": [2.0]}, {"../../up": at}) for at in (1, 2)]
    (tmp_path / "x.json").write_bytes(json_file(replace(RUN, rows=rows).as_dict()))
    written = write_report([tmp_path / "x.json"], tmp_path / "out")
    assert [path.name for path in written] == ["index.html", "x-ratio-by--up.png"]
    assert all(path.parent == tmp_path / "out" for path in written)


def test_results_with_the_same_name_are_rejected(tmp_path: Path):
    (tmp_path / "x.json").write_bytes(json_file(RUN.as_dict()))
    with pytest.raises(InvalidRequest, match="the same name"):
        write_report([tmp_path / "x.json"] * 2, tmp_path / "out")


def test_missing_matplotlib_is_reported_with_install_instructions(
    results: Sequence[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return whole(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=re.escape("charts need: pip install")):
        write_report(results, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unwritable_output_is_a_one_line_error(
    results: Sequence[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "x"):
        assert main(["bench", "report", str(results[-2]), "--output", str(output)]) == 2
        assert capsys.readouterr().err.startswith(f"paceline: cannot write {output}")


def test_works_from_the_command_line(
    results: Sequence[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    command = ["bench", "report", str(results[2]), "--output", str(tmp_path / "out")]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(tmp_path / "out" / "index.html")
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"written": lines}
