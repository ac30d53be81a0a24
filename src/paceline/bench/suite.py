"""The prompt suite: what every comparison runs, named in its result by a hash."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest

_IN_PACKAGE = "suite.jsonl"
_IN_CHECKOUT = Path(__file__).parents[3] / "benchmarks" / "suite.jsonl"


@dataclass(frozen=True, slots=True)
class SuitePrompt:
    """One prompt of a suite."""

    id: str
    kind: str
    messages: Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Suite:
    """Prompts, and the hash of the file they come from."""

    prompts: Sequence[SuitePrompt]
    sha256: str

    def only(self, kinds: Sequence[str], per_kind: int | None = None) -> "Suite":
        """The prompts of some kinds (all when empty), `per_kind` of each; the hash stays.

        Raises:
            InvalidRequest: there is no such kind.

        """
        known = list(dict.fromkeys(prompt.kind for prompt in self.prompts))
        for kind in kinds:
            if kind not in known:
                raise InvalidRequest(f"no prompt is of kind {kind!r}; expected {', '.join(known)}")
        chosen = [
            [prompt for prompt in self.prompts if prompt.kind == kind][:per_kind]
            for kind in known
            if not kinds or kind in kinds
        ]
        return Suite([prompt for group in chosen for prompt in group], self.sha256)


def load_suite(path: Path | None = None) -> Suite:
    """Read a suite: one JSON object a line with `messages`, or with `prompt`, the user's words.

    `id` and `kind` may be there; left out, they are the line's number and `any`.

    Args:
        path: the file; None: paceline's own.

    Raises:
        InvalidRequest: it cannot be read; the message names the line.

    """
    try:
        content = path.read_bytes() if path is not None else _own()
    except OSError as error:
        raise InvalidRequest(f"cannot read {error.filename}: {error.strerror}") from error
    prompts = []
    for number, line in enumerate(content.decode("utf-8", "replace").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_prompt(json.loads(line), number))
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"line {number} of {path or 'the suite'}: {error}") from error
    if not prompts:
        raise InvalidRequest(f"there are no prompts in {path or 'the suite'}")
    return Suite(prompts, sha256(content).hexdigest())


def _prompt(found: Any, number: int) -> SuitePrompt:
    if not isinstance(found, dict) or not ("messages" in found or "prompt" in found):
        raise ValueError("expected an object with messages, or with a prompt")
    messages = found.get("messages", [{"role": "user", "content": found.get("prompt")}])
    if not (
        isinstance(messages, list)
        and messages
        and all(isinstance(message, dict) for message in messages)
    ):
        raise ValueError("messages is not a list of objects")
    if not all(isinstance(message.get("content"), str) for message in messages):
        raise ValueError("a message has no text as its content")
    return SuitePrompt(str(found.get("id", number)), str(found.get("kind", "any")), messages)


def _own() -> bytes:
    packaged = files("paceline.bench").joinpath(_IN_PACKAGE)
    if packaged.is_file():
        return packaged.read_bytes()
    return _IN_CHECKOUT.read_bytes()
