"""Files that the libraries compute correctly: equal rows are not necessarily correct rows.

Weight types were compared with the same weights as F32, at widths of 576 to 9,728 and passes of 1
to 64 rows (tests/engines/test_llamacpp_weights.py): KL 0.0002 to 0.001, as expected from rounded
activations. llama.cpp is the reference for families (tests/engines/test_llamacpp_families.py).
If a library computes a file differently, or crashes on it, its binding refuses the file.
"""

from collections.abc import Sequence
from pathlib import Path

from paceline.errors import ModelError
from paceline.storage.gguf_file import GgufFile, Tensor, short

FLOATS = ("F32", "F16", "BF16")
"""Types without groups."""

TILED = (
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
)
"""Types that llama.cpp multiplies in tiles of 8 rows, if a pass has that many."""

CONVOLUTIONS = (".shortconv.conv.weight", ".ssm_conv1d.weight")
"""Name suffixes of tensors whose products are not of matrices: a few weights per number."""

_EXAONE4_LAYERS = 64
"""Layers of the only EXAONE 4 with a window; the libraries recognize it by them."""

_SCALINGS = ("linear", "longrope", "none", "yarn")
_MANY = 1 << 31


def kind_of(tensor: Tensor) -> str:
    """Return the name of a tensor's type."""
    from gguf import GGMLQuantizationType

    return str(GGMLQuantizationType(tensor.kind).name)


def check_kinds(library: str, name: str, content: GgufFile, compared: Sequence[str]) -> None:
    """Raise ModelError for a type of weights that is not in `compared`.

    `library` and `name`, the file's name, are for the message.
    """
    for tensor in content.tensors:
        if (kind := kind_of(tensor)) not in compared:
            raise ModelError(
                f"{name} has weights of type {kind} ({short(tensor.name)}), which were not "
                f"compared in {library}; expected {', '.join(compared)}: use the model in another "
                "quantization, such as Q4_K_M"
            )


def window_of(library: str, name: str, content: GgufFile) -> int | None:
    """Return a file's attention window in tokens, or None.

    Raises ModelError for a window that both libraries ignore.
    """
    family, window = content.family, content.family_value("attention.sliding_window")
    if not isinstance(window, int) or not window:
        return None
    context, layers = content.family_value("context_length", 0), content.family_value("block_count")
    is_short = isinstance(context, int) and window < context
    if is_short and (family == "llama" or (family == "exaone4" and layers != _EXAONE4_LAYERS)):
        raise ModelError(
            f"{name} has {family}.attention.sliding_window of {window}, which {library} ignores; "
            "use a model of another family"
        )
    return window


def check_numbers(path: Path, content: GgufFile) -> None:
    """Raise ModelError for a scalar value that makes the libraries crash or hang."""

    def integer(name: str, default: int) -> int:
        value = content.family_value(name, default)
        return value if isinstance(value, int) else default

    heads, keys = (max(integer(f"attention.head_count{key}", 1), 1) for key in ("", "_kv"))
    size = integer("attention.key_length", integer("embedding_length", _MANY) // heads)
    used = integer("expert_used_count", 0)
    limits: dict[str, tuple[float, float, int]] = {  # minimum, maximum, required divisor
        "block_count": (1, 512, 1),  # LLAMA_MAX_LAYERS
        "attention.head_count": (keys, _MANY, keys),
        "rope.dimension_count": (2, size, 2),
        "rope.freq_base": (1e-30, 1e30, 0),
        "rope.scaling.factor": (0, 1e30, 0),
        "expert_count": (used, _MANY if used else 0, 1),
    }
    for name in ("head_count_kv", "key_length", "value_length"):
        limits[f"attention.{name}"] = (1, _MANY, 1)
    for name in ("layer_norm_epsilon", "layer_norm_rms_epsilon"):
        limits[f"attention.{name}"] = (1e-30, 1e30, 0)
    faults: list[tuple[str, object, str]] = [
        (name, value, f"{min_value} to {max_value}" + f", a multiple of {step}" * (step > 1))
        for name, (min_value, max_value, step) in limits.items()
        if isinstance(value := content.family_value(name, min_value), int | float)
        and (not min_value <= value <= max_value or (step and value % step))
    ]
    scaling = content.family_value("rope.scaling.type", "none")
    if scaling not in _SCALINGS:
        faults = [("rope.scaling.type", short(repr(scaling)), f"one of {', '.join(_SCALINGS)}")]
    for name, value, expected in faults:
        raise ModelError(
            f"{path} has {short(content.family)}.{name} of {value}; expected {expected}: download "
            "it again"
        )
