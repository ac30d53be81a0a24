"""Known peers by name, and how they are opened.

An engine's name is a peer too: paceline with that engine. A peer that the user names is opened or
an error. Without names all known peers are opened, and those that are not installed or cannot run
the model are skipped, with one line of the reason.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from paceline import plugins
from paceline.engines import ENGINES
from paceline.errors import InvalidRequest, MissingExtra, PacelineError
from paceline.models import Progress
from paceline.runtime.model import Model
from paceline.verify.client import Access
from paceline_lab.peers.base import NotComparable, Peer
from paceline_lab.peers.llama_server.binary import PROGRAM
from paceline_lab.peers.paceline_peer import PacelinePeer
from paceline_lab.peers.server import ServerPeer
from paceline_lab.peers.target import TargetModel


@dataclass(frozen=True, slots=True)
class KnownPeer:
    """A peer that runs here."""

    module: str
    """Module of this package with `open_peers(target)`."""
    imports: Sequence[str] = ()
    packages: str = ""
    """Arguments of `pip install`."""


KNOWN = {
    PROGRAM: KnownPeer("llama_server.peer"),
    "mlx-lm": KnownPeer("mlx", ["mlx_lm"], "mlx-lm"),
}


def check_names(names: Sequence[str]) -> None:
    """Check that all names are installed peers, engines, or servers' base URLs.

    Raises:
        InvalidRequest: there is no such peer.
        MissingExtra: a peer is not installed.
    """
    for name in names:
        if not _is_url(name) and name not in _engines():
            if name not in KNOWN:
                raise InvalidRequest(
                    f"no peer is called {name!r}; expected {', '.join(KNOWN)}, an engine of "
                    f"paceline's ({', '.join(_engines())}), or a server's base URL, as "
                    "http://127.0.0.1:8080/v1"
                )
            _check_installed(name)


def open_all(
    names: Sequence[str],
    target: TargetModel,
    access: Access,
    progress: Progress,
    load: Callable[[str], Model],
) -> list[Peer]:
    """Open the peers of these names; without names, all known peers that are installed.

    `load` opens the model in an engine of paceline's. Raises PacelineError if a named peer cannot
    run the model.
    """
    peers: list[Peer] = []
    for name in dict.fromkeys(names or KNOWN):
        try:
            if name in KNOWN:
                _check_installed(name)
            with progress.task(f"opening {name}"):
                peers += _open(name, target, access, load)
        except PacelineError as error:
            if names:
                raise
            progress.say(f"{name} is skipped: {error}")
    return peers


def _open(
    name: str, target: TargetModel, access: Access, load: Callable[[str], Model]
) -> Sequence[Peer]:
    try:
        if _is_url(name):
            return [ServerPeer(name, access)]
        if name not in KNOWN:
            model = load(name)
            model.measured_costs()
            return [PacelinePeer(model, name)]
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


def _engines() -> tuple[str, ...]:
    return (*ENGINES, *plugins.names(plugins.ENGINES))


def _is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))
