"""What the user's name for a model means, independent of the current folder and of any download.

A name is a name of the registry, the path of a file or folder, or a hub name (owner/name); the
first that fits. `@coreml`, `@mlx`, `@int8`, `@int4` or `@f16` at its end selects a form.
"""

import difflib
from pathlib import Path

from paceline.errors import ModelNotFound
from paceline.models.convert import WEIGHTS
from paceline.models.registry import REGISTRY

CORE_ML_SUFFIX = "@coreml"
"""After a model's name: its form for the engine `coreml`."""
MLX_SUFFIX = "@mlx"
"""After a model's name: its Hugging Face checkpoint, for the engine `mlx`."""

_FORMS = (CORE_ML_SUFFIX[1:], MLX_SUFFIX[1:], *WEIGHTS)


def as_path(name: str) -> Path:
    """`name` as a path. Raises ModelNotFound for one that the system rejects."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # too long, in a closed folder, ~unknown
        reason = getattr(error, "strerror", None) or error
        raise ModelNotFound(f"there is no model {name[:80]!r}: {reason}") from error
    return path


def split_form(name: str) -> tuple[str, str]:
    """Base name and form; the form is empty where none is selected, or the name is a path."""
    base, _, form = name.rpartition("@")
    return (base, form) if form in _FORMS and not as_path(name).exists() else (name, "")


def canonical(base: str) -> str:
    """The same string in every working folder: an existing path is made absolute."""
    path = as_path(base)
    return str(path.resolve()) if base not in REGISTRY and path.exists() else base


def unknown(name: str) -> ModelNotFound:
    """The error for a name that means nothing."""
    if "/" in name or name.endswith((".gguf", ".xml")):
        return ModelNotFound(f"there is no file or folder {name}")
    near = difflib.get_close_matches(name, REGISTRY, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return ModelNotFound(
        f"no model is called {name!r}; {hint}expected one of {', '.join(REGISTRY)}, the path of a "
        "GGUF file or model folder, or a hub name (owner/name)"
    )
