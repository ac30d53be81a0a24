"""Reads recordings from files of several formats.

JSON lines have token ids or text, including answers of `learn`; other formats are the output of
`generate --json` and `bench run`. The tokenizer is opened only for text. Errors name file and line.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest
from paceline.models import ModelFiles
from paceline.runtime.prompt import encode_prompt
from paceline.runtime.request import check
from paceline.storage.files import json_lines
from paceline.storage.text import decode
from paceline_lab.bench.record import FORM as RECORD
from paceline_lab.bench.record import parse_record
from paceline_lab.simulate.replay import Recording

_SPARE = 64
"""Excess of the answer's token limit over its length, if the limit is not recorded."""


Files = Callable[[], ModelFiles]


def read_texts(paths: Sequence[Path], files: Files) -> list[Recording]:
    """Return all recordings of some files, in order; equal ids are numbered.

    `files` opens the model whose tokenizer and chat template encode text. Raises InvalidRequest if
    a file cannot be read, or has a different format, and ModelError as `files` does.
    """
    recordings: dict[str, Recording] = {}
    for path in paths:
        for recording in _recordings_in(path, files):
            name = recording.id
            if name in recordings:
                name = f"{name} ({len(recordings) + 1})"
            recordings[name] = replace(recording, id=name)
    if not recordings:
        raise InvalidRequest("there are no answers in these files; expected at least one")
    return [*recordings.values()]


def _recordings_in(path: Path, files: Files) -> Iterator[Recording]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error
    whole = _json(decode(content, path))
    if isinstance(whole, dict) and whole.get("form") == RECORD:
        yield from _from_record(whole, str(path))
        return
    entries = [(str(path), whole)] if isinstance(whole, dict) else json_lines(content, path)
    for number, (where, entry) in enumerate(entries, start=1):
        try:
            yield _recording(entry, f"{path.stem}:{number}", files)
        except ValueError as error:
            raise InvalidRequest(f"{where}: {error}") from error


def _recording(entry: Mapping[str, Any], name: str, files: Files) -> Recording:
    prompt = _prompt(entry, files)
    answer = _tokens(entry, files, ("token_ids", "answer", "text"), "an answer")
    prediction = _tokens(entry, files, ("prediction",), "") if "prediction" in entry else ()
    limit = None
    if entry.get("finish_reason", entry.get("finish")) == "stop":
        limit = entry.get("max_tokens") or len(answer) + _SPARE
        if not isinstance(limit, int):
            raise ValueError(f"max_tokens is {limit!r}; expected a whole number")
    kind = str(entry.get("kind", "any"))
    return Recording(str(entry.get("id", name)), kind, prompt, answer, limit, prediction)


def _prompt(entry: Mapping[str, Any], files: Files) -> list[int]:
    messages = entry.get("messages")
    if isinstance(entry.get("prompt"), str):
        messages = [{"role": "user", "content": entry["prompt"]}]
    if messages is None or "prompt_token_ids" in entry:
        return _tokens(entry, files, ("prompt_token_ids", "prompt"), "a prompt (or messages)")
    if not (isinstance(messages, list) and all(isinstance(one, dict) for one in messages)):
        raise ValueError("messages is not a list of objects")
    return encode_prompt(files(), messages, check({}))[0]


def _tokens(entry: Mapping[str, Any], files: Files, names: Sequence[str], what: str) -> list[int]:
    """Return the token ids of the first of these fields that the entry has."""
    for name in names:
        value = entry.get(name)
        if isinstance(value, str):
            value = files().tokenizer.encode(value)
        if value is None:
            continue
        if not _are_tokens(value):
            raise ValueError(f"{name} is empty, or neither text nor token ids")
        return list(value)
    raise ValueError(f"expected {what} as {' or '.join(names)}, token ids or text")


def digest(recordings: Sequence[Recording]) -> str:
    text = json.dumps([[[*recording.prompt], [*recording.answer]] for recording in recordings])
    return sha256(text.encode()).hexdigest()


def _from_record(value: Mapping[str, Any], name: str) -> Iterator[Recording]:
    """Yield the recordings of a record whose rows have tokens, such as that of `bench run`."""
    record = parse_record(value, name)
    limit: Any = record.settings.get("max_tokens")
    limit = limit if isinstance(limit, int) else None
    seen = set()
    for row in record.rows:
        prompt: Any = row.facts.get("prompt_token_ids")
        answer: Any = row.facts.get("token_ids")
        if row.case in seen or not (_are_tokens(prompt) and _are_tokens(answer)):
            continue
        seen.add(row.case)
        yield Recording(row.case, row.kind, prompt, answer, limit)
    if not seen:
        raise InvalidRequest(f"{name} has no tokens of answers in it, only figures")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _are_tokens(value: object) -> bool:
    """Return True for a list of token ids with at least one."""
    return isinstance(value, list) and bool(value) and all(type(v) is int and v >= 0 for v in value)
