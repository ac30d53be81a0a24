"""Arguments that several commands about Core ML take; torch and coremltools stay unloaded."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from paceline.errors import InvalidRequest, MissingExtra, pip_install

if TYPE_CHECKING:
    from paceline.models import ModelFiles

Artifact = Annotated[str, Argument(help="a folder that convert made, or NAME@coreml")]
Weights = Literal["int8", "int4", "f16", "int8-per-tensor"]
Stateless = Annotated[
    bool | None, Option("--stateless", help="keys and values as inputs and outputs")
]

_SLOTS = 2048
"""Default of the longest text, at most the model's context length."""


def open_artifact(name: str) -> "ModelFiles":
    """A Core ML model, by path or name. Raises InvalidRequest if it is for another engine."""
    from paceline.models import resolve

    files = resolve(name)
    if files.engine != "coreml":
        raise InvalidRequest(
            f"{name} is a model for the engine {files.engine}; expected a Core ML model, as "
            f"`paceline convert {name} --to coreml` makes it"
        )
    return files


def check_tools(temporary: Path | None) -> None:
    """Raise if what conversion needs is missing.

    Raises:
        InvalidRequest: `temporary` is no folder.
        MissingExtra: torch, transformers or coremltools is not installed.
    """
    if temporary is not None and not temporary.is_dir():
        raise InvalidRequest(f"--temporary {temporary} is not a folder; expected an existing one")
    names = ("coremltools", "torch", "transformers")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"this needs {', '.join(missing)}; install them with: {pip_install('coreml')}"
        )


def slots_of(name: str, context: int, chosen: int | None) -> int:
    """KV cache positions of a model with this context; None: the default.

    Raises InvalidRequest if they are more than the context.
    """
    slots = chosen or min(_SLOTS, context)
    if slots > context:
        raise InvalidRequest(f"slots is {slots}; {name} has a context of {context}")
    return slots
