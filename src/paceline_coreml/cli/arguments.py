"""Arguments shared by the Core ML commands; does not import torch or coremltools."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from paceline.errors import InvalidRequest, MissingExtra, pip_install

if TYPE_CHECKING:
    from paceline.models import ModelFiles

Artifact = Annotated[str, Argument(help="folder created by convert, or NAME@coreml")]


def open_artifact(name: str, expected: str = "a Core ML model") -> "ModelFiles":
    """Open a Core ML model by path or name. Raises InvalidRequest if it is for another engine."""
    from paceline.models import resolve

    files = resolve(name)
    if files.engine != "coreml":
        raise InvalidRequest(
            f"{name} is a model for the engine {files.engine}; expected {expected}, as created by "
            "`paceline convert MODEL --to coreml`"
        )
    return files


def check_tools(temporary: Path | None) -> None:
    """Check the requirements of a conversion.

    Raises:
        InvalidRequest: `temporary` is not a folder.
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
