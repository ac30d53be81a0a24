"""`paceline ps`: the models that servers on this machine have loaded.

A server registers in the cache folder with a file that it keeps locked while it runs.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Annotated, Any

from typer import Option

from paceline.cli.console import print_table, print_value, say
from paceline.cli.options import Output, command, group
from paceline.errors import PacelineError
from paceline.system.machine import Release, cache_dir, lock_path

app = group()

_DEFAULT = "http://127.0.0.1:8000/v1"
"""Where `serve` listens unless told otherwise: one that another user or a service has started."""

_FOLDER = "serving"  # of the cache
_URL = re.compile(r" at (http\S+/v1)")
_SECONDS = 5.0


@command(app, examples=("paceline ps", "paceline ps --url http://127.0.0.1:9000/v1"))
def ps(
    *,
    url: Annotated[
        str | None, Option(metavar="BASE", help="base URL of one server; default: all of yours")
    ] = None,
    output: Output,
) -> int:
    """List what `paceline serve` serves here."""
    urls = [_DEFAULT, *registered_urls()] if url is None else [url]
    models = [model for base in dict.fromkeys(urls) for model in served(base)]
    if output.json or not models:
        if not (models or output.json or output.quiet):
            where = "on this machine" if url is None else f"at {url}"
            say(f"no server listens {where}; `paceline serve` starts one")
        print_value(output, models, "")
        return 0
    fields = ("device", "drafter", "state", "url")
    rows = [[model["id"] or "?", *(model.get(name, "") for name in fields)] for model in models]
    print_table(["model", "device", "drafter", "state", "server"], rows)
    return 0


def served(url: str, key: str | None = None) -> list[dict[str, Any]]:
    """Return name, state, context and URL of each model; none where no server listens.

    Raises PacelineError for one that does not answer as servers do.
    """
    import httpx

    from paceline.client import http_client, key_for, key_headers

    headers = key_headers(key_for(url, key))
    client = http_client(httpx.Client, url, timeout=_SECONDS, headers=headers)
    try:
        with client:
            reply = client.get(f"{url.rstrip('/')}/models")
            entries: list[dict[str, Any]] = [{"id": None, "status": {"value": "needs its key"}}]
            if reply.status_code != HTTPStatus.UNAUTHORIZED:
                reply.raise_for_status()
                entries = reply.json()["data"]
            return [
                {
                    "id": entry["id"],
                    "state": entry.get("status", {}).get("value", "loaded"),
                    "url": url,
                    "context": entry.get("max_model_len"),
                    **{name: entry.get(name, "") for name in ("device", "drafter")},
                }
                for entry in entries
            ]
    except httpx.ConnectError:
        return []
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, AttributeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PacelineError(f"{url} does not list models: {reason}") from error


@contextlib.contextmanager
def registration() -> Iterator[Callable[[str], None]]:
    """Yield a function that registers this server from the line that says where it listens."""
    path = cache_dir() / _FOLDER / f"{os.getpid()}.url"
    release: Release | None = None

    def register(line: str) -> None:
        nonlocal release
        if release is not None or not (url := _URL.search(line)):
            return
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_text(url[1], encoding="utf-8")
            release = lock_path(path, wait=False)

    try:
        yield register
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        if release is not None:
            release()


def registered_urls() -> Iterator[str]:
    """URLs of this user's servers; files of those that have ended are removed."""
    for path in (cache_dir() / _FOLDER).glob("*.url"):
        release = lock_path(path, wait=False)
        with contextlib.suppress(OSError):
            if release is None:
                yield path.read_text(encoding="utf-8")
            else:
                path.unlink(missing_ok=True)
                release()
