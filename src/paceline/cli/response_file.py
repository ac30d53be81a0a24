"""The file of responses of `paceline batch`.

Invariant: a response is on disk before the next one is awaited, and a file for different requests
is never written to. In input order, the file appears when all responses exist, by one rename;
until then they are in `FILE.part`, in order of completion.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Self

from paceline.errors import InvalidRequest
from paceline.storage.files import writing
from paceline.storage.journals import appending, read_journal

_FAILED = 400
"""Responses with this status or a higher one are errors, and missing in the next run."""

_START = b'{"id": "batch_req_'
"""The beginning of a response, as a torn last line has it."""


_FOREIGN = (
    "is not a response to these requests with this model and these options; name another "
    "--output, or remove that file"
)


def _check_end(path: Path) -> None:
    """Raise InvalidRequest for another kind of file, or a last line that no run was writing."""
    if path.exists() and not path.is_file():  # a pipe would be waited for, a device replaced
        raise InvalidRequest(f"cannot write {path}: it is not a file")
    content = path.read_bytes() if path.exists() else b""
    end = content[content.rfind(b"\n") + 1 :].strip(b"\0")
    if not _START.startswith(end[: len(_START)]):
        raise InvalidRequest(f"the last line of {path} {_FOREIGN}")


class ResponseFile:
    """Appends responses inside a `with` block; `in` and `len` cover existing responses."""

    def __init__(self, path: Path, ids: Sequence[str], *, ordered: bool) -> None:
        """Read the responses of an earlier run to the requests `ids`.

        Raises InvalidRequest if some are to other requests.
        """
        self.path = path.with_name(f"{path.name}.part") if ordered else path
        self._final, self._ids = path, ids
        self._counts: dict[str, tuple[bool, int, int]] = {}  # the responses would fill the memory
        known, continued = {*ids}, self.path if self.path.exists() else path
        for file in dict.fromkeys([path, self.path]):  # the final one must also be ours
            _check_end(file)
            for where, response in read_journal(file):
                if response.get("id") not in known:
                    raise InvalidRequest(f"{where} {_FOREIGN}")
                if file == continued and response["response"]["status_code"] < _FAILED:
                    self._counts[response["id"]] = _counts(response)
        self._stack = ExitStack()

    @property
    def total(self) -> int:
        return len(self._ids)

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, id: str) -> bool:
        return id in self._counts

    def __enter__(self) -> Self:
        if self._final.exists() and not self.path.exists():
            with writing(self.path):  # the input has grown since
                shutil.copyfile(self._final, self.path)
        self._append = self._stack.enter_context(appending(self.path))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def append(self, response: dict[str, Any]) -> None:
        """Write a response. Raises InvalidRequest if that fails."""
        self._append(response)
        self._counts[response["id"]] = _counts(response)

    def finish(self) -> None:
        """Replace the file with all responses: in request order, or as they completed."""
        temporary = self._final.with_name(f".{self._final.name}.{os.getpid()}")
        with writing(self._final):
            with self.path.open("rb") as source, temporary.open("wb") as file:
                places = {id: at for at, id in _places(source)}
                for id in self._ids if self.path != self._final else places:
                    source.seek(places[id])
                    file.write(source.readline())
            temporary.replace(self._final)
            if self.path != self._final:
                self.path.unlink()

    def summary(self) -> dict[str, int]:
        """Return counts of all responses: requests, errors, tokens of prompts, cached ones."""
        failed, prompt, cached = zip(*self._counts.values(), strict=True)
        tokens = {"prompt_tokens": sum(prompt), "cached_tokens": sum(cached)}
        return {"requests": len(failed), "failed": sum(failed), **tokens}


def _places(file: IO[bytes]) -> Iterator[tuple[int, str]]:
    """Yield the offset and the id of each response in a file of them."""
    at = 0
    for line in file:
        if line.strip():
            yield at, json.loads(line)["id"]
        at += len(line)


def _counts(response: dict[str, Any]) -> tuple[bool, int, int]:
    """Return whether a response is an error, its prompt tokens, and the cached ones of them."""
    failed, body = response["response"]["status_code"] >= _FAILED, response["response"]["body"]
    if "stats" in body:
        return failed, body["prompt_tokens"], body["stats"]["cached_tokens"]
    usage = body.get("usage") or {}
    tokens = usage.get("prompt_tokens", usage.get("input_tokens", 0))
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return failed, tokens, details.get("cached_tokens", 0)
