"""Recorded sessions of agents: one message per line, a JSON object with `role` and `content`.

A turn is an answer of the assistant; the messages before it are its prompt. Tool calls and their
results are text in messages, so that every chat template renders them.
"""

from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import InvalidRequest
from paceline.runtime.model import Model
from paceline.storage.files import json_lines
from paceline.storage.validation import validated
from paceline.verify.suite import packaged, prompt_for

SESSIONS = ("coding", "documents")
"""Built-in sessions, of ten turns each."""


@dataclass(frozen=True, slots=True)
class _Message:
    role: str
    content: str


class SessionTurn(NamedTuple):
    """A recorded answer, and the messages before it."""

    name: str
    number: int
    """Number of the turn, from 1."""
    messages: list[dict[str, Any]]
    prompt: list[int]
    """The messages in the model's chat template, encoded."""
    answer: list[int]
    """The recorded answer, encoded, with the token that ends it."""


@dataclass(frozen=True, slots=True)
class AgentSession:
    name: str
    messages: list[dict[str, Any]]
    sha256: str

    def turns(self, model: Model) -> list[SessionTurn]:
        encode = model.files.tokenizer.encode
        turns: list[SessionTurn] = []
        for place, message in enumerate(self.messages):
            if message["role"] == "assistant":
                number, before = len(turns) + 1, self.messages[:place]
                prompt = model.tokens(prompt_for(model.files, before))
                answer = [*encode(message["content"]), *model.files.stop_token_ids[:1]]
                name = f"{self.name}, turn {number}"
                turns.append(SessionTurn(name, number, before, prompt, answer))
        return turns


def load_sessions(path: Path | None) -> list[AgentSession]:
    """Return the session in a file, or the built-in ones. Raises InvalidRequest, with the line."""
    if path is None:
        names = ((name, f"agent_{name}.jsonl") for name in SESSIONS)
        return [_parsed(name, packaged("paceline_lab.agent", file), file) for name, file in names]
    try:
        return [_parsed(path.stem, path.read_bytes(), str(path))]
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error


def _parsed(name: str, content: bytes, file: str) -> AgentSession:
    messages: list[dict[str, Any]] = []
    for where, entry in json_lines(content, file):
        messages.append(asdict(validated(_Message, entry, where)))
        if messages[0]["role"] == "assistant":
            raise InvalidRequest(f"{where} is an answer; expected a message before it")
    if "assistant" not in [message["role"] for message in messages]:
        raise InvalidRequest(
            f"{file} has no answer to replay; expected one message with role and content per "
            "line, some of them by the assistant"
        )
    return AgentSession(name, messages, sha256(content).hexdigest())
