"""Text input and output: byte order marks, encodings, control characters."""

import codecs
import logging
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.chat.session import read_chat, write_chat
from paceline.cli.console import read_text
from paceline.cli.options import default_model
from paceline.errors import InvalidRequest, ModelError
from paceline.server.run import print_line, request_log
from paceline.server.settings import api_keys
from paceline.storage.files import json_lines, read_json
from paceline.storage.text import decode, path_of, text_bytes, visible
from support.errors import raises

TEXT = '{"role": "user", "content": "é"}'
TOML = 'model = "é"'
ENCODED = {
    "UTF-16": codecs.BOM_UTF16_LE + TOML.encode("utf-16-le"),
    "UTF-16 ": TOML.encode("utf-16-be"),
    "UTF-32": codecs.BOM_UTF32_BE + TOML.encode("utf-32-be"),
}


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("PACELINE_MODEL", raising=False)
    monkeypatch.setattr("platformdirs.user_config_path", lambda _name: tmp_path / "config")
    (tmp_path / "config").mkdir()
    return tmp_path / "config" / "config.toml"


def readers(path: Path, config: Path) -> dict[str, Any]:
    """Readers of a user's text: name -> content, reader, result."""
    line = {"role": "user", "content": "é"}
    return {
        "prompt": (TEXT, lambda: read_text(path), TEXT),
        "object": (TEXT, lambda: read_json(path), line),
        "lines": (TEXT, lambda: next(json_lines(path.read_bytes(), path))[1], line),
        "chat": (f"[{TEXT}]", lambda: read_chat(path), [line]),
        "keys": ("é\ntwo", lambda: api_keys([], path, {}), ("é", "two")),
        "config": (TOML, lambda: config.write_bytes(path.read_bytes()) and default_model(), "é"),
    }


@pytest.mark.parametrize("reader", ["prompt", "object", "lines", "chat", "keys", "config"])
def test_a_byte_order_mark_is_ignored_and_utf_16_is_reported(
    reader: str, tmp_path: Path, config: Path
):
    path = tmp_path / "file"
    content, read, expected = readers(path, config)[reader]
    for mark in (b"", codecs.BOM_UTF8):
        path.write_bytes(mark + content.encode())
        assert read() == expected
    for name, wrong in ENCODED.items():
        path.write_bytes(wrong)
        with raises((InvalidRequest, ModelError), f"is {name.strip()} text; save it as UTF-8"):
            read()


def test_a_byte_order_mark_is_not_part_of_a_key(tmp_path: Path):
    assert api_keys(["\ufeffkey"], None, {}) == ("key",)
    assert api_keys([], None, {"PACELINE_API_KEY": "\ufeffkey"}) == ("key",)
    (tmp_path / "keys").write_bytes(codecs.BOM_UTF8)
    with raises(InvalidRequest, "the API key is empty"):
        api_keys([], tmp_path / "keys", {})


def test_a_few_invalid_bytes_are_replaced_with_a_warning():
    lines: list[str] = []
    assert decode(b"one\nt\xffwo", "it", lines.append) == "one\nt\ufffdwo"
    assert lines == [
        "[it is not UTF-8 text: line 2, byte 2 is 0xFF; such bytes, 1 in all, are read as U+FFFD]"
    ]
    with raises(ModelError, "it is not UTF-8 text: line 2, byte 2 is 0xFF; `iconv"):
        decode(b"one\nt\xffwo", "it", error=ModelError)


def test_a_chat_with_a_lone_surrogate_can_be_loaded_again(tmp_path: Path):
    messages = [{"role": "user", "content": "\ud800"}]
    write_chat(tmp_path / "chat", messages)
    assert read_chat(tmp_path / "chat") == messages


@pytest.mark.parametrize(
    ("text", "shown", "in_a_line"),
    [
        ("plain é 好 🙂", None, None),
        ("a\tb\nc", None, r"a\tb\nc"),
        ("\x1b]52;c;aGk=\x07", r"\x1b]52;c;aGk=\x07", r"\x1b]52;c;aGk=\x07"),
        ("\x00\r\x7f\x9b31m", r"\x00\r\x7f\x9b31m", r"\x00\r\x7f\x9b31m"),
        ("gpj\u202egnp", None, r"gpj\u202egnp"),  # a name that ends with png, as it seems
        ("a\u2028b\u2067c", None, r"a\u2028b\u2067c"),
        ("two faults:\n  one\n  two\nthree", None, "two faults:\n  one\n  two" + r"\nthree"),
        ("\udcff.gguf", r"\xff.gguf", r"\xff.gguf"),
        ("\udcc3\udca9\ud800", "é" + r"\ud800", "é" + r"\ud800"),  # é where the locale is C
        ("[red]", None, None),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str | None, in_a_line: str | None):
    assert visible(text) == (text if shown is None else shown)
    assert visible(text, line=True) == (text if in_a_line is None else in_a_line)


def test_a_path_has_the_same_bytes_in_every_locale():
    assert text_bytes("\udcc3\udca9\udcff") == b"\xc3\xa9\xff"
    assert bytes(path_of("é")) == bytes(path_of("\udcc3\udca9")) == b"\xc3\xa9"


def test_a_client_cannot_start_a_line_in_the_log(capsys: pytest.CaptureFixture[str]):
    forged = "x\n12:00:00 POST / 200\r\x1b[2J\u2028"
    for quiet in (False, True):
        with request_log(quiet=quiet):
            logging.getLogger("paceline.server").warning("from %s", forged)
            try:
                int(forged.strip("\u2028"))
            except ValueError:
                logging.getLogger("paceline.runtime.any").exception("failed: %s", forged)
        print_line(forged)
        lines = capsys.readouterr().err.splitlines()
        assert len([line for line in lines if not line.startswith("  ")]) == 3
        assert all(map(str.isprintable, lines))
        assert r"from x\n12:00:00 POST / 200\r\x1b[2J\u2028" in lines[0]
