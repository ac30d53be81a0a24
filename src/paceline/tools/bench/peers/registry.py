"""Which peers there are by name, and opening those that are asked for.

The rule: one that was asked for by name is opened or is an error; of the others those that are not
installed, or cannot answer this model, are left out, with one line that says why.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from paceline.errors import InvalidRequest, MissingExtra, PacelineError
from paceline.models import Progress
from paceline.tools.bench.peers.base import NotComparable, Peer
from paceline.tools.bench.peers.server import Access, open_server
from paceline.tools.bench.peers.target import Target


@dataclass(frozen=True, slots=True)
class Known:
    """A peer that runs in this process."""

    module: str
    """Ours; it has `open_peers(target)`."""
    imports: Sequence[str]
    packages: str
    """What pip installs."""


KNOWN = {
    "openvino-genai": Known("genai", ["openvino_genai"], "openvino-genai"),
    "llama-cpp-python": Known("llama_cpp", ["llama_cpp"], "llama-cpp-python"),
    "transformers": Known(
        "hugging_face", ["transformers", "torch"], "transformers torch accelerate"
    ),
    "mlx-lm": Known("mlx", ["mlx_lm"], "mlx-lm"),
}


def check_names(names: Sequence[str]) -> None:
    """See to it that each is a peer that is here, or a server's base URL.

    Raises:
        InvalidRequest: there is no such peer.
        MissingExtra: it is not installed.
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
    names: Sequence[str], target: Target, access: Access, progress: Progress
) -> list[Peer]:
    """The peers of these names, or all that are known and here when there are none.

    Raises:
        PacelineError: one that was asked for cannot answer the model.
    """
    found: list[Peer] = []
    for name in dict.fromkeys(names or KNOWN):
        try:
            if not _is_url(name):
                _check_installed(name)
            with progress.task(f"opening {name}"):
                found += _open(name, target, access)
        except PacelineError as error:
            if names:
                raise
            progress.say(f"{name} is left out: {error}")
    return found


def _open(name: str, target: Target, access: Access) -> Sequence[Peer]:
    try:
        if _is_url(name):
            return [open_server(name, access)]
        module = import_module(f"{__package__}.{KNOWN[name].module}")
        peers: Sequence[Peer] = module.open_peers(target)
    except PacelineError:
        raise
    except Exception as error:  # of any kind: every runtime has its own
        raise NotComparable(f"{name} cannot open {target.files.name}: {reason(error)}") from error
    return peers


def reason(error: Exception) -> str:
    """An error of somebody else's, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _check_installed(name: str) -> None:
    known = KNOWN[name]
    if any(importlib.util.find_spec(module) is None for module in known.imports):
        raise MissingExtra(f"{name} is not installed here: pip install {known.packages}")


def _is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))
