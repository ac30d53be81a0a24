"""The session of a chat without a terminal: commands, undo, files, and switching models."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.answers import AnswerArguments
from paceline.cli.chat.commands import EndOfChat, run_command
from paceline.cli.chat.session import Session
from paceline.cli.options import ModelOptions, Output
from paceline.errors import InvalidRequest, ModelError
from paceline.models import resolve
from paceline.options import STRUCTURES
from paceline.runtime.conversation import Conversation
from support.errors import raises


@pytest.fixture
def session(cache: Path, tiny_gguf: Path) -> Iterator[Session]:
    answer = AnswerArguments(given={"max_tokens": 4, "ignore_eos": True, "system": "Be"})
    session = Session(ModelOptions(str(tiny_gguf)), answer, Output(quiet=True))
    session.open()
    yield session
    session.close()


def said(session: Session) -> list[str]:
    return [message["content"] for message in session.messages if message["role"] == "user"]


def test_every_step_can_be_undone(session: Session, tmp_path: Path):
    for text in ("one", "two"):
        session.turn(text)
    path = tmp_path / "chat.json"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "other"}]}))
    states = []
    for command in ("/set temperature 2", "/regen", "/system new", f"/load {path}", "/clear"):
        states.append(session.messages)
        assert run_command(session, command)
    assert session.messages == []
    for before in reversed(states[1:]):
        run_command(session, "/undo")
        assert session.messages == before
    run_command(session, "/undo")
    assert said(session) == ["one"]
    run_command(session, "/undo")
    with pytest.raises(InvalidRequest):
        run_command(session, "/undo")


def test_a_failed_retry_keeps_the_previous_response(
    session: Session, monkeypatch: pytest.MonkeyPatch
):
    session.turn("one")
    before = session.messages
    monkeypatch.setattr(Conversation, "send", lambda *_, **__: pytest.fail())
    with pytest.raises(pytest.fail.Exception):
        run_command(session, "/regen")
    assert session.messages == before


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("temperature 0.5", "temperature", 0.5),
        ("max-tokens -1", "max_tokens", None),
        ("think off", "think", False),
        ("stop two words", "stop", ["two words"]),
        ("drafter none", "drafter", "none"),
        ("parameter temperature 0.5", "temperature", 0.5),
        ("num_predict 9", "max_tokens", 9),
        ("repeat_penalty 1.5", "repetition_penalty", 1.5),
        ("format json", "json_schema", '{"type": "object"}'),
        ('schema {"type": "string"}', "json_schema", '{"type": "string"}'),
        ("regex a+", "regex", "a+"),
        ("grammar root ::= x", "grammar", "root ::= x"),
    ],
)
def test_an_option_is_set_and_reset(session: Session, words: str, name: str, value: Any):
    run_command(session, "/set ignore_eos off")  # it cannot be combined with a structure
    run_command(session, f"/set {words}")
    assert session.options[name] == value
    run_command(session, f"/set {words.removeprefix('parameter ').split(maxsplit=1)[0]} default")
    assert name not in session.options


def test_a_new_structure_replaces_the_old_one(session: Session):
    for words in ("ignore_eos off", "schema json", "regex a+", "grammar root ::= x"):
        run_command(session, f"/set {words}")
    assert {*session.options} & {*STRUCTURES} == {"grammar"}


def test_ollama_switches_are_supported(session: Session):
    for words in ("ignore_eos off", "format json", "nothink", "noformat"):
        run_command(session, f"/set {words}")
    assert session.options["think"] is False
    assert "json_schema" not in session.options


def test_set_system_is_an_alias_of_the_system_command(session: Session):
    run_command(session, '/set system "Be brief."')
    assert session.system == "Be brief."


@pytest.mark.parametrize(
    "command",
    [
        *("/set temperature hot", "/set top-p 2", "/set heat 1", "/set heat", "/set drafter no"),
        *("/load", "/load /no/such/file", "/save /no/such/folder/file", "/save ~nobody/x"),
        *("/clear now", "/foo", "/regen", "/model nope", "/model /no/such.gguf"),
        *("/set schema /no/file", "/set format xml"),
        *("/load \0", "/set think yes", "/set drafter mtp"),
    ],
)
def test_a_failed_command_changes_nothing(session: Session, command: str):
    before = (session.messages, dict(session.options), session.model)
    with pytest.raises((InvalidRequest, ModelError)) as error:
        run_command(session, command)
    assert "\n" not in str(error.value)
    assert (session.messages, session.options, session.model) == before
    session.turn("one")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "5", '[{"role": "user"}]', '[{"role": "king", "content": "x"}]']
)
def test_a_corrupt_chat_file_is_rejected_and_the_conversation_kept(
    session: Session, content: str, tmp_path: Path
):
    session.turn("one")
    path = tmp_path / "chat.json"
    path.write_text(content)
    with pytest.raises(InvalidRequest):
        run_command(session, f"/load {path}")
    assert said(session) == ["one"]


def test_saving_a_chat_overwrites_only_saved_chats(session: Session, tmp_path: Path):
    session.turn("one")
    run_command(session, f"/save {tmp_path / 'chat.json'}")
    session.turn("two")
    run_command(session, "/save")
    run_command(session, "/clear")
    assert session.saved_as == "", "a new conversation does not replace the file"
    run_command(session, f"/load {tmp_path / 'chat.json'}")
    assert said(session) == ["one", "two"]
    (tmp_path / "other").touch()
    with pytest.raises(InvalidRequest):
        run_command(session, f"/save {tmp_path / 'other'}")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_saving_to_a_full_disk_keeps_the_conversation(
    session: Session, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> int:
        raise OSError(28, os.strerror(28))

    session.turn("one")
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InvalidRequest) as refused:
        run_command(session, "/save chat.json")
    assert str(refused.value).count("cannot write") == 1
    assert said(session) == ["one"]


def test_the_conversation_continues_after_switching_models_or_a_failed_switch(
    session: Session, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    session.turn("one")
    other = tmp_path / "other.gguf"
    other.write_bytes(tiny_gguf.read_bytes())
    run_command(session, f"/model {other}")
    session.turn("two")
    files = resolve(str(other))  # the other one vanishes after that
    monkeypatch.setattr("paceline.cli.chat.session.resolve", lambda *_, **__: files)
    with pytest.raises(ModelError):
        run_command(session, f"/model {tmp_path / 'gone.gguf'}")
    assert session.model == str(other)
    session.turn("three")
    assert said(session) == ["one", "two", "three"]


def test_only_known_commands_are_run(session: Session):
    for message in ("hello", "/usr/bin", "/* C */", " /bye", "/foo\nbar"):
        assert not run_command(session, message)
    with raises(InvalidRequest, "did you mean /model?", "a space before it sends it"):
        run_command(session, "/modle")
    with pytest.raises(EndOfChat):
        run_command(session, "/exit")
