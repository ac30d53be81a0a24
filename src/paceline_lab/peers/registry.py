"""Known peers by name, and how they are opened.

A peer that the user names is opened or an error. Without names all known peers are opened, and
those that are not installed or cannot run the model are skipped, with one line of the reason.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from paceline.bench.servers import Access
from paceline.errors import InvalidRequest, MissingExtra, PacelineError
from paceline.models import Progress
from paceline_lab.peers.base import NotComparable, Peer
from paceline_lab.peers.server import ServerPeer
from paceline_lab.peers.target import TargetModel


@dataclass(frozen=True, slots=True)
class KnownPeer:
    """A peer that runs in this process."""

    module: str
    """Module of this package with `open_peers(target)`."""
    imports: Sequence[str]
    packages: str
    """Arguments of `pip install`."""


KNOWN = {
    "openvino-genai": KnownPeer("genai", ["openvino_genai"], "openvino-genai"),
    "llama-cpp-python": KnownPeer("llama_cpp", ["llama_cpp"], "llama-cpp-python"),
    "transformers": KnownPeer(
        "hugging_face", ["transformers", "torch"], "transformers torch accelerate"
    ),
    "mlx-lm": KnownPeer("mlx", ["mlx_lm"], "mlx-lm"),
}


def check_names(names: Sequence[str]) -> None:
    """Check that all names are installed peers or servers' base URLs.

    Raises:
        InvalidRequest: there is no such peer.
        MissingExtra: a peer is not installed.
    """
    for name in names:
        if not _is_url(name):
            if name not in KNOWN:
                raise InvalidRequest(
                    f"no peer is called {name!r}; expected {', '.join(KNOWN)}, or a server's base "
                    "URL, as http://127.0.0.1:8080/v1"
                )
            _check_installed(name)


def open_all(
    names: Sequence[str], target: TargetModel, access: Access, progress: Progress
) -> list[Peer]:
    """Open the peers of these names; without names, all known peers that are installed.

    Raises PacelineError if a named peer cannot run the model.
    """
    peers: list[Peer] = []
    for name in dict.fromkeys(names or KNOWN):
        try:
            if not _is_url(name):
                _check_installed(name)
            with progress.task(f"opening {name}"):
                peers += _open(name, target, access)
        except PacelineError as error:
            if names:
                raise
            progress.say(f"{name} is skipped: {error}")
    return peers


def _open(name: str, target: TargetModel, access: Access) -> Sequence[Peer]:
    try:
        if _is_url(name):
            return [ServerPeer(name, access)]
        module = import_module(f"{__package__}.{KNOWN[name].module}")
        peers: Sequence[Peer] = module.open_peers(target)
    except PacelineError:
        raise
    except Exception as error:  # every runtime has its own types
        raise NotComparable(f"{name} cannot open {target.files.name}: {one_line(error)}") from error
    return peers


def one_line(error: Exception) -> str:
    """Message of any exception, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _check_installed(name: str) -> None:
    known = KNOWN[name]
    if any(importlib.util.find_spec(module) is None for module in known.imports):
        raise MissingExtra(f"{name} is not installed here: pip install {known.packages}")


def _is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))
