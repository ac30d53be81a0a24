"""Servers: those of this user, which are registered locally, and HTTP clients for any.

A server registers in the cache folder with a file that stays locked while the server runs.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import urlsplit

from paceline.errors import InvalidRequest, PacelineError, proxy_fault
from paceline.system.machine import Release, cache_dir, is_loopback, lock_path

_Client = TypeVar("_Client")

_FOLDER = "serving"  # in the cache
_URL = re.compile(r" at (http\S+/v1)")
_TIMEOUTS = {"timeout": 30.0, "connect": 5.0}  # seconds; a busy server lists models late


def served(url: str, key: str | None = None) -> list[dict[str, Any]]:
    """Return name, state, context, URL and owner of each model; none where no server listens.

    Raises PacelineError for a server that does not answer as expected.
    """
    import httpx

    headers = key_headers(key_for(url, key))
    client = http_client(httpx.Client, url, timeout=httpx.Timeout(**_TIMEOUTS), headers=headers)
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
                    **{name: entry.get(name, "") for name in ("device", "drafter", "owned_by")},
                }
                for entry in entries
            ]
    except httpx.ConnectError:
        return []
    except Exception as error:  # anything may listen there
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise PacelineError(
            f"{url} does not list models: {reason}; expected a base URL, such as "
            "http://127.0.0.1:8000/v1"
        ) from error


@contextlib.contextmanager
def registration() -> Iterator[Callable[[str], None]]:
    """Yield a function that prints a server's lines; that with the address registers it."""
    from paceline.server.run import print_line

    path = cache_dir() / _FOLDER / f"{os.getpid()}.url"
    release: Release | None = None

    def write(line: str) -> None:
        nonlocal release
        print_line(line)
        if release is not None or not (url := _URL.search(line)):
            return
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_text(url[1], encoding="utf-8")
            release = lock_path(path, wait=False)

    try:
        yield write
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        if release is not None:
            release()


def registered_urls() -> Iterator[str]:
    """Yield URLs of this user's servers; remove files of those that have ended."""
    for path in (cache_dir() / _FOLDER).glob("*.url"):
        release = lock_path(path, wait=False)
        with contextlib.suppress(OSError):
            if release is None:
                yield path.read_text(encoding="utf-8")
            else:
                path.unlink(missing_ok=True)
                release()


def key_for(url: str, key: str | None) -> str | None:
    """Return the API key for a server: `key`, or PACELINE_API_KEY if it is on this machine.

    The variable has the key of the user's own server, so no other host gets it.
    """
    return key or (os.environ.get("PACELINE_API_KEY") if _is_here(url) else None)


def _is_here(url: str) -> bool:
    """Return whether a URL has a loopback address."""
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False


def http_client(kind: Callable[..., _Client], url: str, **options: Any) -> _Client:
    """Return an httpx client for a server; a loopback address is reached without a proxy.

    Raises InvalidRequest for a proxy that httpx cannot use.
    """
    try:
        return kind(trust_env=not _is_here(url), **options)
    except Exception as error:
        raise InvalidRequest(f"{url} cannot be reached: {proxy_fault(error)}") from error


def key_headers(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
