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
    """Read a suite: one JSON object a line with `id`, `kind` and `messages`.

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
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            prompts.append(SuitePrompt(found["id"], found["kind"], found["messages"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidRequest(
                f"line {number} of the suite is not an object with id, kind and messages: {error}"
            ) from error
    if not prompts:
        raise InvalidRequest(f"there are no prompts in {path or 'the suite'}")
    return Suite(prompts, sha256(content).hexdigest())


def _own() -> bytes:
    packaged = files("paceline.bench").joinpath(_IN_PACKAGE)
    if packaged.is_file():
        return packaged.read_bytes()
    return _IN_CHECKOUT.read_bytes()
