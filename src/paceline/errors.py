"""Errors that paceline raises on purpose.

A message has the value, the expected ones, and what to do. The command line prints the message
and exits with `exit_code`; only bugs show a traceback.
"""

import difflib
import os
import re
from collections.abc import Iterable

_ELSEWHERE = {
    **dict.fromkeys(("n_ctx", "num_ctx", "max_model_len", "max_kv_size"), "cache_tokens"),
    **dict.fromkeys(("n_gpu_layers", "gpu_layers", "device_map"), "device"),
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens"), "max_tokens"),
    **dict.fromkeys(("model", "model_path", "repo_id"), "name_or_path"),
    **dict.fromkeys(("n_threads", "num_thread"), "threads"),
    **{"draft_model": "drafters", "stop_sequences": "stop", "temp": "temperature"},
}
"""Names in llama.cpp, ollama, vLLM, mlx-lm and transformers -> the name in Python."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question with the nearest known name, for a message; empty if none is near."""
    known = [*known]
    ours = _ELSEWHERE.get(name)
    near = [ours] if ours in known else difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}? " if near else ""


def pip_install(extra: str) -> str:
    """Return the command that adds an extra to paceline, from where it was installed."""
    import json
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        read = distribution("paceline").read_text
        origin = json.loads(read("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    url: str = origin.get("url", "")
    if url.startswith("file:"):
        option = "-e " if origin.get("dir_info", {}).get("editable") else ""
        return f"pip install {option}'{url2pathname(urlsplit(url).path)}[{extra}]'"
    if vcs := origin.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"pip install 'paceline[{extra}]{url and f' @ {url}'}'"


def proxy_fault(error: Exception) -> str:
    """Return why no HTTP client can be made, with the variables that it reads, for a message."""
    reason = " ".join(str(error).split()).rstrip(".")
    known = "(all|https?)_proxy" if "proxy" in reason.lower() else "ssl_cert_(file|dir)"
    names = [f"${name}" for name in os.environ if re.fullmatch(known, name.lower())]
    return f"{reason}; correct or unset {' or '.join(names) or 'the proxy of the system'}"


class PacelineError(Exception):
    """An error that the user can act on. `exit_code` is the command line's exit status."""

    exit_code = 2


class InvalidRequest(PacelineError, ValueError):
    """An invalid parameter or prompt: wrong type, out of range, too long, empty."""


class ContextFull(InvalidRequest):
    """A conversation and a new message leave no room for an answer. The conversation is unchanged.

    `tokens` is the length of both, `context` the maximum length of both with an answer. `turns` is
    the number of oldest turns to drop for the message to fit; None: it never fits.
    """

    def __init__(self, message: str, *, tokens: int, context: int, turns: int | None) -> None:
        super().__init__(message)
        self.tokens, self.context, self.turns = tokens, context, turns


class ModelError(PacelineError):
    """A model that cannot be found, fetched, read or verified."""


class ModelNotFound(ModelError):
    """No model with that name or path exists, here or where it would be fetched from."""


class CacheFull(PacelineError):
    """The key/value cache has no free blocks left for a sequence."""


class Busy(PacelineError):
    """Too much of the same kind is being done; it may succeed later."""


class MissingExtra(PacelineError):
    """A command needs packages that come with one of paceline's extras."""


class CheckFailed(PacelineError):
    """A check (`verify`, `models --check`) failed."""

    exit_code = 1
