"""The file of responses of `paceline batch`.

Invariant: a response is on disk before the next one is awaited, and a file for different requests
is never written to. In input order, the file appears when all responses exist, by one rename;
until then they are in `FILE.part`, in order of completion.
"""

import json
import os
import shutil
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest
from paceline.storage.files import writing
from paceline.storage.journals import Append, appending

_FAILED = 400
"""Responses with this status or a higher one are errors, and missing in the next run."""

_START = b'{"id": "batch_req_'
"""The beginning of a response, as a torn last line has it."""

_FOREIGN = (
    "is not a response to these requests with this model and these options; name another "
    "--output, or remove that file"
)


class ResponseFile:
    """The existing responses, for `in` and `len`, and those that `appending` adds."""

    def __init__(self, path: Path, ids: Sequence[str], *, ordered: bool) -> None:
        """Read the responses of an earlier run to the requests `ids`.

        Raises InvalidRequest if some are to other requests.
        """
        self.path = path.with_name(f"{path.name}.part") if ordered else path
        self._final, self._ids = path, ids
        # Id -> offset and counts: the responses would fill the memory.
        self._found: dict[str, tuple[int, bool, int, int]] = {}
        known, continued = {*ids}, self.path if self.path.exists() else path
        for file in dict.fromkeys([path, self.path]):  # the final one must also be ours
            for place, response in _read(file, known):
                counts = _counts(response)
                if file == continued and not counts[0]:
                    self._found[response["id"]] = place, *counts

    @property
    def total(self) -> int:
        return len(self._ids)

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, id: str) -> bool:
        return id in self._found

    @contextmanager
    def appending(self) -> Iterator[Append]:
        """Yield a function that writes a response. Raises InvalidRequest if that fails."""
        if self._final.exists() and not self.path.exists():
            with writing(self.path):  # the input has grown since
                shutil.copyfile(self._final, self.path)
        with appending(self.path) as append:

            def add(response: dict[str, Any]) -> None:
                place = self.path.stat().st_size
                append(response)
                self._found[response["id"]] = place, *_counts(response)

            yield add

    def finish(self) -> None:
        """Replace the file with all responses: in request order, or as they completed."""
        temporary = self._final.with_name(f".{self._final.name}.{os.getpid()}")
        with writing(self._final):
            with self.path.open("rb") as source, temporary.open("wb") as file:
                for id in self._ids if self.path != self._final else self._found:
                    source.seek(self._found[id][0])
                    file.write(source.readline())
            temporary.replace(self._final)
            if self.path != self._final:
                self.path.unlink()

    def summary(self) -> dict[str, int]:
        """Return counts of all responses: requests, errors, tokens of prompts, cached ones."""
        _, failed, prompt, cached = zip(*self._found.values(), strict=True)
        tokens = {"prompt_tokens": sum(prompt), "cached_tokens": sum(cached)}
        return {"requests": len(failed), "failed": sum(failed), **tokens}


def _read(path: Path, known: Container[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the offset of each response in a file, and the response.

    Raises InvalidRequest for responses whose id is not `known`, or another kind of file.
    """
    if path.exists() and not path.is_file():  # a pipe would be waited for, a device replaced
        raise InvalidRequest(f"cannot write {path}: it is not a file")
    *lines, end = path.read_bytes().split(b"\n") if path.exists() else [b""]
    if not _START.startswith(end.strip(b"\0")[: len(_START)]):  # no run was writing it
        raise InvalidRequest(f"the last line of {path} {_FOREIGN}")
    place = 0
    for number, line in enumerate(lines, 1):
        if line.strip():
            response: dict[str, Any] = {}
            with suppress(ValueError):
                response = json.loads(line) if line.startswith(_START) else {}
            if response.get("id") not in known:
                raise InvalidRequest(f"line {number} of {path} {_FOREIGN}")
            yield place, response
        place += len(line) + 1


def _counts(response: dict[str, Any]) -> tuple[bool, int, int]:
    """Return whether a response is an error, its prompt tokens, and the cached ones of them."""
    failed, body = response["response"]["status_code"] >= _FAILED, response["response"]["body"]
    if "stats" in body:
        return failed, body["prompt_tokens"], body["stats"]["cached_tokens"]
    usage = body.get("usage") or {}
    tokens = usage.get("prompt_tokens", usage.get("input_tokens", 0))
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return failed, tokens, details.get("cached_tokens", 0)
