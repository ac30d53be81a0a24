"""Suites of prompts for benchmarks; a result has the suite's SHA-256.

A suite is paceline's own file, a user's, or Spec-Bench's `question.jsonl` (arXiv 2401.07851), whose
questions may have a second turn, sent after the answer to the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from paceline.errors import InvalidRequest
from paceline.models import ModelFiles
from paceline.runtime.prompt import Prompt
from paceline.storage.files import json_lines
from paceline.storage.validation import Limit, validated

CONVERSATION = "multi-turn conversation"
"""Spec-Bench's name of the eight categories of MT-Bench together."""

_MT_BENCH = (
    *("writing", "roleplay", "reasoning", "math"),
    *("coding", "extraction", "stem", "humanities"),
)


@dataclass(frozen=True, slots=True)
class SuitePrompt:
    """A prompt and, in Spec-Bench, the turns after it."""

    id: str
    kind: str
    messages: Sequence[dict[str, Any]]
    """The messages before the first answer."""
    turns: Sequence[str] = ()
    """The user's further messages, one after each answer; only `bench run` sends them."""
    category: str = ""
    """Spec-Bench's category; empty in other suites."""


@dataclass(frozen=True, slots=True)
class Suite:
    """Prompts, and the SHA-256 of their file."""

    prompts: Sequence[SuitePrompt]
    sha256: str


def prompt_for(files: ModelFiles, messages: Sequence[dict[str, Any]]) -> Prompt:
    """Return a model's prompt: the messages, or their text for a base model (no template).

    Token ids in the second case.
    """
    if files.chat_template is not None:
        return messages
    text = "\n\n".join(str(message["content"]) for message in messages)
    return files.tokenizer.encode(text, special=True)


def load_suite(path: Path | None = None) -> Suite:
    """Read a suite: one JSON object per line, with `messages`, or with `prompt`, a user message.

    `id` and `kind` are optional, by default the prompt's number and `any`. Lines of Spec-Bench have
    `question_id`, `category` and `turns`, the user's messages; their kinds are Spec-Bench's six
    groups. Other fields are ignored.

    None is paceline's own. Raises InvalidRequest if the file cannot be read, or a line is no
    prompt; the message names the line.
    """
    try:
        content = (
            path.read_bytes() if path is not None else packaged("paceline.verify", "suite.jsonl")
        )
    except OSError as error:
        raise InvalidRequest(f"cannot read {error.filename}: {error.strerror}") from error
    prompts: dict[str, SuitePrompt] = {}
    for where, entry in json_lines(content, path or "the suite"):
        prompt = _prompt(entry, len(prompts) + 1, where)
        if prompt.id in prompts:
            raise InvalidRequest(f"two prompts have the id {prompt.id!r}; expected ids that differ")
        prompts[prompt.id] = prompt
    if not prompts:
        raise InvalidRequest(f"there are no prompts in {path or 'the suite'}")
    return Suite([*prompts.values()], sha256(content).hexdigest())


@dataclass(frozen=True, slots=True)
class _Message:
    content: str


@dataclass(frozen=True, slots=True)
class _Messages:
    messages: Annotated[list[_Message], Limit(min_length=1)]


@dataclass(frozen=True, slots=True)
class _Question:
    turns: Annotated[list[Annotated[str, Limit(min_length=1)]], Limit(min_length=1)]


def _prompt(entry: dict[str, Any], number: int, where: str) -> SuitePrompt:
    if "turns" in entry:
        first, *turns = validated(_Question, entry, where).turns
        category = str(entry.get("category", "any"))
        return SuitePrompt(
            str(entry.get("question_id", number)),
            CONVERSATION if category in _MT_BENCH else category,
            [{"role": "user", "content": first}],
            turns,
            category,
        )
    if not ("messages" in entry or "prompt" in entry):
        raise InvalidRequest(f"{where}: expected an object with messages, prompt or turns")
    messages = entry.get("messages", [{"role": "user", "content": entry.get("prompt")}])
    validated(_Messages, {"messages": messages}, where)
    return SuitePrompt(str(entry.get("id", number)), str(entry.get("kind", "any")), messages)


def packaged(package: str, name: str) -> bytes:
    """Return a package's data file; a checkout has it in `benchmarks`. Raises OSError."""
    path = files(package).joinpath(name)
    checkout = Path(__file__).parents[3] / "benchmarks" / name
    return path.read_bytes() if path.is_file() else checkout.read_bytes()
