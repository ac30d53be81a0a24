"""Servers of this user that run; and `generate`'s answer from one that has the same model.

A server registers in the cache folder, with a file that only its user can read, and that it keeps
locked while it runs: no other user's program can take its place. Invariant: an answer has the
tokens that it would have here, and every setting is sent. So the server must have the same files;
unless the seed is drawn, also the same engine, with rows that were measured not to depend on other
requests.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import __version__
from paceline.cli.answers import AnswerArguments, ending_of
from paceline.cli.console import SERVING, say
from paceline.cli.models import exactness_text
from paceline.cli.options import MAX_TOKENS, ModelOptions, Output
from paceline.storage.system import Release, cache_dir, lock_path

if TYPE_CHECKING:
    from paceline.models import ModelFiles
    from paceline.runtime.model import Model
    from paceline.runtime.request import Request

_URL = re.compile(r" at (http\S+/v1)")
_SECONDS = 5.0
"""For a connection."""

_ANSWER = ("system", "max_tokens", "stop", "ignore_eos", "repetition_detection", "seed")
_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    "frequency_penalty",
)
_SENT = (*_ANSWER, *_SAMPLING, "generation_config")
"""Options that a server can be sent; with others the model is loaded here."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """What a server registers."""

    url: str
    fingerprint: str
    """Of the files of the model that `generate` may ask it for; empty: it may not."""
    engine: str
    version: str


class Unavailable(Exception):
    """A server that did not begin to answer."""


@contextlib.contextmanager
def registration(model: "Model | None") -> Iterator[Any]:
    """Yield a function that registers a server from the line that says where it listens.

    None: `generate` may not ask it.
    """
    path = _folder() / f"{os.getpid()}.json"
    release: Release | None = None

    def register(line: str) -> None:
        nonlocal release
        if release is not None or not (url := _URL.search(line)):
            return
        of = ("", "") if model is None else (model.files.fingerprint, model.engine.name)
        server = RunningServer(url[1], *of, __version__)
        with contextlib.suppress(OSError):  # `generate` then loads the model
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                release = lock_path(path, wait=False)
                json.dump(asdict(server), file)

    try:
        yield register
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        if release is not None:
            release()


def running_server(model: ModelOptions, answer: AnswerArguments) -> "tuple[str, ModelFiles] | None":
    """The URL of a server that gives the same answer, and the model's files; None: there is none.

    Raises what finding the model's files raises.
    """
    servers = [*running_servers()]
    if not (servers and _sends_all(answer, _SENT) and _sends_all(model, ("model",))):
        return None
    from paceline.runtime.load import find_files

    files = find_files(model.model)
    is_drawn = answer.seed is None and _request(files, answer).sampling.temperature > 0
    for server in servers:
        if (server.fingerprint, server.version) != (files.fingerprint, __version__):
            continue
        if is_drawn or (server.engine == files.engine and _is_exact(files)):
            return server.url, files
    return None


def _is_exact(files: "ModelFiles") -> bool:
    """Whether rows were measured, in the engine of the files, not to depend on other requests."""
    from paceline.runtime.profile import stored_exactness

    measured = stored_exactness(files.fingerprint)
    ours = [profile for profile in measured if profile["engine"]["engine"] == files.engine]
    return exactness_text(ours) == "yes"


def print_answer(
    url: str, files: "ModelFiles", prompt: str, answer: AnswerArguments, output: Output
) -> None:
    """Print an answer as it comes: thoughts dim on standard error, as `step_printer` does.

    Raises as `stream` does.
    """
    from paceline.runtime.highlight import dim

    think, thinking, reason, count = dim(), False, "", 0
    for chunk in stream(url, files, prompt, answer):
        count = (chunk.get("usage") or {}).get("completion_tokens", count)
        for choice in chunk["choices"]:
            reason = choice["finish_reason"] or reason
            if not output.quiet and (thought := choice["delta"].get("reasoning")):
                think(thought)
                thinking = True
            if text := choice["delta"].get("content"):
                if thinking:
                    think("\n\n")
                    thinking = False
                print(text, end="", flush=True)
    print(flush=True)
    limit = MAX_TOKENS if answer.max_tokens is None else answer.max_tokens
    line = ending_of(reason, count, limit, asked=answer.max_tokens is not None)
    if line is not None and not output.quiet:
        say(f"[{line}]")


def stream(url: str, files: "ModelFiles", prompt: str, answer: AnswerArguments) -> Iterator[Any]:
    """The chunks of an answer, as in OpenAI's API; the last has the usage.

    Raises Unavailable before the first chunk, PacelineError after it.
    """
    import httpx

    from paceline.errors import PacelineError

    begun = False
    timeout, body = httpx.Timeout(None, connect=_SECONDS), _body(files, prompt, answer)
    try:
        with (
            httpx.Client(trust_env=False, timeout=timeout) as client,
            client.stream("POST", f"{url}/chat/completions", json=body) as reply,
        ):
            reply.raise_for_status()
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    begun = True
                    yield chunk
    except (httpx.HTTPError, ValueError) as error:
        if not begun:
            raise Unavailable from error
        raise PacelineError(f"the server at {url} stopped in the middle of its answer") from error


def _body(files: "ModelFiles", prompt: str, answer: AnswerArguments) -> dict[str, Any]:
    """The request with every setting that the model would have here."""
    request = _request(files, answer)
    limit, loop = request.max_tokens, request.repetition
    messages = [{"role": "user", "content": prompt}]
    if answer.system is not None:
        messages.insert(0, {"role": "system", "content": answer.system})
    return {
        "messages": messages,
        **{name: getattr(request.sampling, name) for name in _SAMPLING},
        "seed": request.sampling.seed,
        "max_tokens": -1 if limit is None else limit,
        "stop": list(request.stop),
        "ignore_eos": request.ignore_eos,
        "repetition_detection": None if loop is None else asdict(loop),
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _request(files: "ModelFiles", answer: AnswerArguments) -> "Request":
    """The answer's options, with the defaults that the model has here."""
    from paceline.runtime.request import check, defaults_of

    defaults = replace(defaults_of(files), fallback={"max_tokens": MAX_TOKENS})
    return check(answer.options(), defaults)


def _sends_all(options: Any, sent: tuple[str, ...]) -> bool:
    """Whether all options that are set are among those sent."""
    return all(
        field.name in sent or getattr(options, field.name) == field.default
        for field in fields(options)
    )


def running_servers() -> Iterator[RunningServer]:
    """Servers of this user that run."""
    for path in _folder().glob("*.json"):
        release = lock_path(path, wait=False)
        if release is not None:  # it has ended
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            release()
            continue
        with contextlib.suppress(OSError, ValueError, TypeError):
            value = json.loads(path.read_text(encoding="utf-8"))
            yield RunningServer(**value)


def _folder() -> Path:
    return cache_dir() / SERVING
