"""Settings of pip and uv: which package indexes are asked for a wheel, and how they are reached.

Read as pip reads them, without pip: its configuration files, those of the machine first, then
variables of the environment. uv's variables count where pip has none; uv's files are not read.
"""

import os
import re
import sys
from collections.abc import Iterable, Mapping
from configparser import Error, RawConfigParser
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ModelError

PYPI = "https://pypi.org/simple"
_TIMEOUT = 15.0
"""Seconds without a byte; pip's default."""
_TRUE = {"1", "y", "yes", "t", "true", "on"}
_SECTIONS = ("global", "download")
"""Of configuration files, as `pip download` reads them; later ones win."""
_UV = {
    "index-url": ("UV_DEFAULT_INDEX", "UV_INDEX_URL"),
    "extra-index-url": ("UV_INDEX", "UV_EXTRA_INDEX_URL"),
    "find-links": ("UV_FIND_LINKS",),
    "no-index": ("UV_NO_INDEX",),
    "trusted-host": ("UV_INSECURE_HOST",),
    "timeout": ("UV_HTTP_TIMEOUT",),
}
"""uv's variables for a setting of pip; the first that is set counts."""
_INDEX_NAME = re.compile(r"[\w.-]+=")


@dataclass(frozen=True, slots=True)
class Source:
    """A place that lists files: a package index, or a folder or page of links."""

    url: str
    """An address, or a path on this machine; it may have credentials."""
    is_index: bool


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """Where files are looked for, and how hosts are reached."""

    sources: tuple[Source, ...] = (Source(PYPI, is_index=True),)
    """Folders and pages of links first, then indexes."""
    trusted_hosts: tuple[str, ...] = ()
    """Hosts (`host` or `host:port`) whose certificate is not checked, or that have none."""
    certificates: str | None = None
    """File or folder of the accepted authorities; None: $SSL_CERT_FILE, or the system's."""
    proxy: str | None = None
    """Address of a proxy; None: $HTTPS_PROXY, $HTTP_PROXY, $ALL_PROXY and $NO_PROXY."""
    timeout: float = _TIMEOUT
    """Seconds that a host may take to connect, or to send the next bytes."""


def read_settings(environment: Mapping[str, str] = os.environ) -> IndexSettings:
    """The user's settings.

    Raises ModelError for a configuration file or a value that cannot be read.
    """
    values = _file_values(environment) | _uv_values(environment) | _pip_values(environment)
    indexes: list[str] = []
    if values.get("no-index", "").lower() not in _TRUE:
        indexes = [values.get("index-url", PYPI), *values.get("extra-index-url", "").split()]
    links = values.get("find-links", "").split()
    sources = [
        Source(link if "://" in link else str(Path(link).expanduser()), is_index=False)
        for link in links
    ]
    sources += [Source(_INDEX_NAME.sub("", url, count=1), is_index=True) for url in indexes]
    if environment.get("UV_OFFLINE", "").lower() in _TRUE:
        sources = [
            source
            for source in sources
            if "://" not in source.url or source.url.startswith("file:")
        ]
    proxy = values.get("proxy")
    return IndexSettings(
        sources=tuple(sources),
        trusted_hosts=tuple(values.get("trusted-host", "").split()),
        certificates=values.get("cert"),
        proxy=f"http://{proxy}" if proxy and "://" not in proxy else proxy,
        timeout=_seconds(values.get("timeout")),
    )


def _file_values(environment: Mapping[str, str]) -> dict[str, str]:
    parser = RawConfigParser()
    try:
        parser.read(_files(environment), encoding="utf-8")
    except (Error, UnicodeDecodeError) as error:
        fault = str(error).replace("\n", " ")
        raise ModelError(f"pip's configuration cannot be read: {fault}") from error
    sections = [parser.items(section) for section in _SECTIONS if parser.has_section(section)]
    return _by_option(item for items in sections for item in items)


def _files(environment: Mapping[str, str]) -> list[Path]:
    """Configuration files of pip, whether they exist or not; later ones win."""
    chosen = environment.get("PIP_CONFIG_FILE")
    if chosen == os.devnull:
        return []
    from platformdirs import PlatformDirs, user_config_path

    on_windows = sys.platform == "win32"
    machine = PlatformDirs("pip", appauthor=False, multipath=True).site_config_dir
    folders = [Path(folder) for folder in machine.split(os.pathsep)]
    folders += [] if sys.platform in ("win32", "darwin") else [Path("/etc")]
    if not (chosen and Path(chosen).exists()):
        usual = user_config_path("pip", appauthor=False, roaming=True)
        if sys.platform == "darwin" and not usual.is_dir():
            usual = Path.home() / ".config" / "pip"
        folders += [Path.home() / ("pip" if on_windows else ".pip"), usual]
    files = [folder / ("pip.ini" if on_windows else "pip.conf") for folder in folders]
    files.append(Path(sys.prefix) / files[0].name)
    return [*files, Path(chosen)] if chosen else files


def _pip_values(environment: Mapping[str, str]) -> dict[str, str]:
    prefix = "PIP_"
    return _by_option(
        (name.removeprefix(prefix), value)
        for name, value in environment.items()
        if name.startswith(prefix)
    )


def _uv_values(environment: Mapping[str, str]) -> dict[str, str]:
    values = {}
    for option, names in _UV.items():
        value = next((environment[name] for name in names if environment.get(name)), "")
        # uv separates links by commas.
        values[option] = value.replace(",", " ") if option == "find-links" else value
    return _by_option(values.items())


def _by_option(items: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Values that are not empty, by the name of pip's option."""
    named = ((name.lower().replace("_", "-"), value.strip()) for name, value in items)
    return {name.removeprefix("default-"): value for name, value in named if value}


def _seconds(text: str | None) -> float:
    if text is None:
        return _TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ModelError(
            f"the setting timeout of pip or uv is {text}; expected a number of seconds above 0"
        )
    return seconds
