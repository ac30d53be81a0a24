"""How peers are opened: those known by name, and servers by their URL.

A peer that the user names is opened or an error. Without names all known peers are opened, and
those that are not installed or cannot run the model are skipped, with one line of the reason.
"""

from collections.abc import Callable, Sequence

from paceline.errors import InvalidRequest, MissingExtra, PacelineError
from paceline.models import Progress
from paceline.verify.client import Access
from paceline_lab.peers.base import NotComparable, Peer, TargetModel
from paceline_lab.peers.llama_server.binary import PROGRAM
from paceline_lab.peers.llama_server.peer import LlamaServer
from paceline_lab.peers.mlx import MlxLm
from paceline_lab.peers.server import ServerPeer

KNOWN: dict[str, Callable[[TargetModel], Peer]] = {PROGRAM: LlamaServer, "mlx-lm": MlxLm}
"""Name -> opens the peer, or raises MissingExtra if it is not installed."""


def check_names(names: Sequence[str]) -> None:
    """Raise InvalidRequest unless all names are known peers, or servers' base URLs."""
    for name in names:
        if not _is_url(name) and name not in KNOWN:
            raise InvalidRequest(
                f"no peer is called {name!r}; expected {', '.join(KNOWN)}, or a server's base URL, "
                "as http://127.0.0.1:8080/v1"
            )


def open_all(
    names: Sequence[str], target: TargetModel, access: Access, progress: Progress
) -> list[Peer]:
    """Open the peers of these names; without names, all known peers that are installed.

    Raises PacelineError if a named peer is not installed or cannot run the model, or if there is no
    peer.
    """
    peers: list[Peer] = []
    for name in dict.fromkeys(names or KNOWN):
        try:
            with progress.task(f"opening {name}"):
                peers.append(_open(name, target, access))
        except PacelineError as error:
            if names:
                raise
            progress.say(f"{name} is skipped: {error}")
    if not peers:
        raise MissingExtra(
            f"no peer can be compared with here; expected {', '.join(KNOWN)}, or a server's URL "
            "with --peer"
        )
    return peers


def _open(name: str, target: TargetModel, access: Access) -> Peer:
    if _is_url(name):
        return ServerPeer(name, access)
    try:
        return KNOWN[name](target)
    except PacelineError:
        raise
    except Exception as error:  # every runtime has its own types
        raise NotComparable(f"{name} cannot open {target.files.name}: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """Message of any exception, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))
