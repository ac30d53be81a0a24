"""The prompt suite: what every comparison runs, named in its result by a hash.

A file of ours or a user's own, or Spec-Bench's `question.jsonl` as it is (arXiv 2401.07851): its
questions may have a second turn, which is asked once the first one has been answered.
"""

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

CONVERSATION = "multi-turn conversation"
"""What Spec-Bench calls the eight categories of MT-Bench together."""

_MT_BENCH = (
    *("writing", "roleplay", "reasoning", "math"),
    *("coding", "extraction", "stem", "humanities"),
)


@dataclass(frozen=True, slots=True)
class SuitePrompt:
    """One prompt of a suite."""

    id: str
    kind: str
    messages: Sequence[dict[str, Any]]
    """Up to the first answer."""
    turns: Sequence[str] = ()
    """What the user says after each answer but the last; only `bench run` asks these, too."""
    category: str = ""
    """Spec-Bench's own name of what it is about; empty in other suites."""


@dataclass(frozen=True, slots=True)
class Suite:
    """Prompts, and the hash of the file they come from."""

    prompts: Sequence[SuitePrompt]
    sha256: str

    def only(
        self, kinds: Sequence[str], per_kind: int | None = None, limit: int | None = None
    ) -> "Suite":
        """The prompts of some kinds (all when empty), `per_kind` of each; the hash stays.

        With a limit, that many of these in all: the same number of each kind (the first kinds have
        one more where it does not divide), and of n prompts of a kind the k at floor(i n / k).

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
        if limit is not None:
            counts = _shares([len(group) for group in chosen], limit)
            chosen = [
                [group[i * len(group) // count] for i in range(count)]
                for group, count in zip(chosen, counts, strict=True)
            ]
        return Suite([prompt for group in chosen for prompt in group], self.sha256)


def load_suite(path: Path | None = None) -> Suite:
    """Read a suite: one JSON object a line with `messages`, or with `prompt`, the user's words.

    `id` and `kind` may be there; left out, they are the line's number and `any`. Lines of
    Spec-Bench have `question_id`, `category` and `turns` instead, the user's words turn by turn;
    their kinds are Spec-Bench's six groups. Other fields are ignored.

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


def _shares(sizes: Sequence[int], total: int) -> list[int]:
    """As many of each group as of the others, where they have them: `total` in all, or all."""
    found = [0] * len(sizes)
    left = min(total, sum(sizes))
    while left:
        open_groups = [at for at, size in enumerate(sizes) if found[at] < size]
        for at in open_groups[:left]:
            found[at] += 1
        left -= len(open_groups[:left])
    return found


def _prompt(found: Any, number: int) -> SuitePrompt:
    if isinstance(found, dict) and "turns" in found:
        return _question(found, number)
    if not isinstance(found, dict) or not ("messages" in found or "prompt" in found):
        raise ValueError("expected an object with messages, with a prompt, or with turns")
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


def _question(found: dict[str, Any], number: int) -> SuitePrompt:
    turns, category = found["turns"], str(found.get("category", "any"))
    if not (
        isinstance(turns, list) and turns and all(isinstance(turn, str) and turn for turn in turns)
    ):
        raise ValueError(
            f"turns is {_short(turns)}; expected texts that are not empty, one at least"
        )
    return SuitePrompt(
        str(found.get("question_id", number)),
        CONVERSATION if category in _MT_BENCH else category,
        [{"role": "user", "content": turns[0]}],
        turns[1:],
        category,
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _own() -> bytes:
    packaged = files("paceline.tools").joinpath(_IN_PACKAGE)
    if packaged.is_file():
        return packaged.read_bytes()
    return _IN_CHECKOUT.read_bytes()
