"""`llama-server` as a peer: plain, and each n-gram lookup with its default values.

The lookups are in the server's own code and not in its libraries, so the program itself is started.
A path can name any program, so it is first run with --version and --help only, for a limited time,
before it is accepted.

The lookups keep n-grams of earlier requests (one pool of n-grams for all, or a cache that is
never emptied), so every answer has a server of its own: nothing is reused, as with the other peers.
Times are the server's own; the client measures the time of the whole answer.

Invariant: once a `ServerProcess` is closed, its server has ended.
"""

import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.errors import InvalidRequest, MissingExtra, ModelError
from paceline.models import ModelFiles
from paceline.system.machine import cpu_cores
from paceline.system.processes import end_session
from paceline_lab.bench.turns import PromptTurn
from paceline_lab.peers.measure import PeerAnswer

if TYPE_CHECKING:
    import httpx

PROGRAM = "llama-server"

LOOKUPS = ("ngram-simple", "ngram-mod", "ngram-cache")
"""Values of --spec-type that draft from n-grams alone; ngram-map-k is a form of ngram-simple."""

_SECONDS = 30.0
"""Time limit for the help, in seconds; a real server takes 0.1 s."""

_VERSION = re.compile(r"^version: (.+)$", re.MULTILINE)

READY_SECONDS = 600.0
"""Time limit for loading, in seconds: a large file may be on a slow disk."""
_HEALTH_SECONDS = 5.0
_ANSWER_SECONDS = 3600.0
_END_SECONDS = 1.0
_POLL_SECONDS = 0.01
_MAX_REASON = 300
"""Maximum characters of a server's own message."""
_KEY_VARIABLE = "LLAMA_API_KEY"
_SETTINGS = "LLAMA_ARG_"
"""Occurs in the names of environment variables that set further server options."""
PLAIN = "plain"
_LONGEST_DRAFT = 64
"""Tokens, the default of ngram-mod; the KV cache needs room for them after the answer."""
_GREEDY = {
    "temperature": 0.0,
    # A model's file may set other values, which would also apply to greedy answers.
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "cache_prompt": False,
    "return_tokens": True,
}


class ServerBinary(NamedTuple):
    path: Path
    version: str
    """The version as printed: a number, and the commit in brackets."""
    lookups: tuple[str, ...]
    """The supported `LOOKUPS`."""

    @property
    def lacking(self) -> str:
        """A sentence about the unsupported lookups; empty if all are supported."""
        missing = [name for name in LOOKUPS if name not in self.lookups]
        if not missing:
            return ""
        option = f"no {', '.join(missing)}" if self.lookups else "no --spec-type"
        return (
            f"{PROGRAM} {self.version} has {option}: rows of {', '.join(missing)} are left out; "
            "a newer one has them"
        )


def server_binary(path: str | None) -> ServerBinary:
    """Return the server at a path; with None, the first on PATH. Raises MissingExtra without one.

    Raises InvalidRequest if the path is not a program, or not a `llama-server`.
    """
    place = shutil.which(path or PROGRAM)
    if place is None and path is None:
        raise MissingExtra(
            f"{PROGRAM} is not on PATH: install llama.cpp, or name the program with --llama-server"
        )
    if place is None:
        raise InvalidRequest(
            f"{path} is not executable; expected the path of llama.cpp's {PROGRAM}"
        )
    version = _VERSION.search(_output(place, "--version"))
    manual = _output(place, "--help") if version else ""
    if version is None or "--port" not in manual:
        raise InvalidRequest(
            f"{place} is not {PROGRAM}: it lacks --version and --port, which llama.cpp's server "
            "has; expected the path of that program"
        )
    types = manual.partition("--spec-type")[2].partition("\n")[0]
    lookups = tuple(name for name in LOOKUPS if name in re.split(r"[\s,|\[\]]+", types))
    return ServerBinary(Path(place).resolve(), version[1].strip(), lookups)


def _output(program: str, option: str) -> str:
    """Return a program's output, both streams; nothing if it does not end."""
    try:
        return subprocess.run(
            [program, option],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_SECONDS,
            check=False,
        ).stdout.decode(errors="replace")
    except subprocess.TimeoutExpired:
        return ""
    except OSError as error:  # not an executable of this system
        raise InvalidRequest(f"{program} cannot be started: {error.strerror}") from error


class ServerProcess:
    """A running server; call `ask` for one request at a time."""

    def __init__(self, program: Path, options: Sequence[str]) -> None:
        """Start it, and wait until it has loaded its model. Raises ModelError if it does not."""
        self.program = program
        with socket.socket() as listener:  # on a free port
            listener.bind(("127.0.0.1", 0))
            self._port = listener.getsockname()[1]
        # Pages of other sites must not reach a server that allows all origins.
        self._key = secrets.token_hex(16)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        address = ["--host", "127.0.0.1", "--port", str(self._port)]
        variables = {name: one for name, one in os.environ.items() if _SETTINGS not in name}
        self._process = subprocess.Popen(
            [str(program), *options, *address],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**variables, _KEY_VARIABLE: self._key},
            start_new_session=True,  # this process handles Ctrl-C
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def ask(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a POST request; return its JSON answer. Raises ModelError if there is none."""
        import httpx

        try:
            reply = self._request("POST", path, body, _ANSWER_SECONDS)
            answer = reply.json() if reply.is_success else None
        except (httpx.HTTPError, ValueError) as error:
            try:
                self._process.wait(_END_SECONDS)  # its connections close shortly before it ends
            except subprocess.TimeoutExpired:
                fault = f"{self.program.name} gave no answer to {path}: {error!r}"
                raise ModelError(fault) from error
            raise self._failed("ended in an answer") from error
        if not isinstance(answer, dict):
            reason = " ".join(reply.text.split())[:_MAX_REASON]
            status = reply.status_code
            raise ModelError(f"{self.program.name} answered {path} with status {status}: {reason}")
        return answer

    def close(self) -> None:
        end_session(self._process)
        self._log.close()

    def _wait_until_ready(self) -> None:
        import httpx

        deadline = monotonic() + READY_SECONDS
        while monotonic() < deadline:
            # Before the request: another process may have the port.
            if self._process.poll() is not None:
                raise self._failed("ended before it was ready")
            with suppress(httpx.HTTPError):
                if self._request("GET", "/health", None, _HEALTH_SECONDS).is_success:
                    return
            sleep(_POLL_SECONDS)
        raise self._failed(f"was not ready after {READY_SECONDS:.0f} s")

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float
    ) -> "httpx.Response":
        import httpx

        # Not with a client that uses the proxies of the environment.
        with httpx.Client(trust_env=False, timeout=seconds) as client:
            headers = {"Authorization": f"Bearer {self._key}"}
            url = f"http://127.0.0.1:{self._port}{path}"
            return client.request(method, url, json=body, headers=headers)

    def _failed(self, how: str) -> ModelError:
        """Return an error with the first error line that the server wrote, or its last line."""
        self._log.seek(0)
        written = self._log.read().decode(errors="replace").split("\n")
        lines = [" ".join(line.split()) for line in written if line.strip()]
        errors = [line for line in lines if "error" in line.lower() or "fail" in line.lower()]
        reason = (errors[:1] or lines[-1:] or ["it wrote nothing"])[0][:_MAX_REASON]
        code = self._process.poll()
        status = "" if code is None else f" (exit code {code})"
        return ModelError(f"{self.program.name} {how}{status}: {reason}")


class LlamaServer:
    """Starts a server for each answer, on the GGUF file itself."""

    name = PROGRAM

    def __init__(
        self,
        files: ModelFiles,
        binary: ServerBinary,
        context: int,
        *,
        threads: int | None,
        on_message: Callable[[str], None],
    ) -> None:
        """Start it once, so that its errors are raised before anything is measured.

        `context` is the tokens of the longest question and its answer; without `threads`, one per
        core that this process may use; `on_message` prints a note for the user.

        Raises ModelError if the model is not a GGUF file, or the server cannot load it.
        """
        if files.weights is None:
            raise ModelError(f"{files.name} is not a GGUF file")
        if binary.lacking:
            on_message(binary.lacking)
        self._files, self._program = files, binary.path
        self.modes: Sequence[str] = (PLAIN, *binary.lookups)
        options = [
            *("--ctx-size", str(context + _LONGEST_DRAFT + 1)),
            *("--threads", str(threads or cpu_cores())),
            *("--parallel", "1"),
            *("--device", "none"),  # as in the engine llamacpp
        ]
        self._options = ["--model", str(files.weights), *options]
        self.settings: Mapping[str, Any] = {
            "version": binary.version,
            "weights": files.weights.name,
            "options": options,
            "lookups": [*binary.lookups],
        }
        ServerProcess(self._program, self._options).close()

    def answer(self, question: PromptTurn, max_tokens: int, mode: str) -> PeerAnswer:
        body = {"prompt": [*question.tokens], "n_predict": max_tokens, **_GREEDY}
        speculation = [] if mode == PLAIN else ["--spec-type", mode]
        with closing(ServerProcess(self._program, [*self._options, *speculation])) as server:
            began = perf_counter()
            reply = server.ask("/completion", body)
            seconds = perf_counter() - began
        answer = self._read(reply, seconds)
        stops = self._files.stop_token_ids
        ends = (place for place, token in enumerate(reply["tokens"][:-1], 1) if token in stops)
        # The server ignored a stop token that paceline has: repeat the request up to that token.
        end = next(ends, None)
        return answer if end is None else self.answer(question, end, mode)

    def _read(self, reply: Mapping[str, Any], seconds: float) -> PeerAnswer:
        """Return the answer in a reply of /completion; `seconds` are the client's."""
        try:
            tokens = [int(token) for token in reply["tokens"]]
            times = reply["timings"]
            first, decode = times["prompt_ms"] / 1e3, times["predicted_ms"] / 1e3
            drafts = int(times.get("draft_n", 0)), int(times.get("draft_n_accepted", 0))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"its answer has no tokens and timings; fields: {[*reply]}") from error
        if not tokens:
            raise ModelError(
                "its answer has no token ids: this version does not support return_tokens"
            )
        count = len(tokens)
        while tokens and tokens[-1] in self._files.stop_token_ids:
            tokens.pop()
        text = self._files.tokenizer.continuation(tokens)
        return PeerAnswer(text, tokens, count, first, decode, seconds, drafts)
