"""What the user's name for a model means, independent of the current folder and of any download.

A name is a short name, the path of a file or folder, a model of another program (`other_apps.py`),
or a hub name (`hub_names.py`); the first that fits. `@coreml`, `@mlx`, `@int8`, `@int4` or `@f16`
at its end selects a form.
"""

import difflib
from pathlib import Path

from paceline.errors import InvalidRequest, ModelNotFound
from paceline.models.names.hub_names import HubName, parse_hub_name
from paceline.models.names.registry import DEFAULT_MODEL, REGISTRY, known, known_models

CORE_ML_SUFFIX = "@coreml"
"""After a model's name: its form for the engine `coreml`."""
MLX_SUFFIX = "@mlx"
"""After a model's name: its Hugging Face checkpoint, for the engine `mlx`."""

WEIGHTS = ("int8", "int4", "f16")
"""Forms of a model's weights, after an @ in its name."""

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


def with_weights(name: str, weights: str) -> str:
    """`name` in the form with `weights`.

    Raises InvalidRequest if there is no such form, or the name selects another.
    """
    if weights not in WEIGHTS:
        raise InvalidRequest(f"weights is {weights!r}; expected one of {', '.join(WEIGHTS)}")
    base, form = split_form(name)
    if form not in ("", weights):
        raise InvalidRequest(
            f"{name} has the form {form}, and weights is {weights}; leave one of them away"
        )
    return f"{base}@{weights}"


def canonical(base: str) -> str:
    """The same string in every working folder: an existing path is made absolute."""
    path = as_path(base)
    return str(path.resolve()) if not is_short(base) and path.exists() else base


def is_short(base: str) -> bool:
    """Whether `base` is a short name, which means the same in every folder."""
    return base in REGISTRY or ("/" not in base and known(base) is not None)


def hub_name_of(base: str) -> HubName | None:
    """The model on the hub that a short name, a hub name or an address stands for.

    None if it is none of them. Raises ModelNotFound for an address that is not a model's.
    """
    return parse_hub_name(base) if "/" in base else known(base)


def unknown(name: str) -> ModelNotFound:
    """The error for a name that means nothing."""
    base, _, form = name.rpartition("@")
    if base and form.isalnum():
        return ModelNotFound(
            f"{name} ends with the form {form}; expected one of {', '.join(_FORMS)}, or the name "
            "alone"
        )
    if "/" in name or name.endswith((".gguf", ".xml")):
        return ModelNotFound(f"there is no file or folder {name}")
    near = difflib.get_close_matches(name, (*REGISTRY, *known_models()), n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return ModelNotFound(
        f"no model is called {name!r}; {hint}expected a name such as {DEFAULT_MODEL} (`paceline "
        "models` lists them), the path of a GGUF file or model folder, or a hub name (owner/name, "
        "or owner/name:Q4_K_M)"
    )
