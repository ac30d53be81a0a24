"""Files that the libraries compute right: equal rows are not yet right rows.

Types of weights were compared with the same weights as F32, at widths of 576 to 9,728 and calls of
1 to 64 rows (tests/engines/test_llamacpp_weights.py): KL 0.0002 to 0.001, what rounded activations
make. llama.cpp is the reference of families (tests/engines/test_llamacpp_families.py).
What a library computes otherwise, or ends the process with, its binding refuses.
"""

from collections.abc import Iterator, Sequence

from paceline.errors import ModelError
from paceline.storage.gguf_file import GgufFile, Tensor, short

FLOATS = ("F32", "F16", "BF16")
"""Types without groups."""

_EXAONE4_LAYERS = 64
"""Layers of the one EXAONE 4 with a window, by which the libraries know that it has one."""


def kinds(
    library: str, name: str, content: GgufFile, compared: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    """Tensors with the names of their types. Raises ModelError for one that is not in `compared`.

    `library` and `name`, the file's, are for the message.
    """
    from gguf import GGMLQuantizationType

    for tensor in content.tensors:
        kind = GGMLQuantizationType(tensor.kind).name
        if kind not in compared:
            raise ModelError(
                f"{name} has weights of type {kind} ({short(tensor.name)}), which were not "
                f"compared in {library}; expected {', '.join(compared)}: get the model in another "
                "quantization, such as Q4_K_M"
            )
        yield kind, tensor


def window_of(library: str, name: str, content: GgufFile) -> int | None:
    """Tokens of the window of attention that a file has; None: it has none.

    Raises ModelError for a window that both libraries ignore.
    """
    family = content.fields.get("general.architecture")
    window = content.fields.get(f"{family}.attention.sliding_window")
    if not isinstance(window, int) or not window:
        return None
    context = content.fields.get(f"{family}.context_length", 0)
    is_short = isinstance(context, int) and window < context
    layers = content.fields.get(f"{family}.block_count")
    if is_short and (family == "llama" or (family == "exaone4" and layers != _EXAONE4_LAYERS)):
        raise ModelError(
            f"{name} has {family}.attention.sliding_window of {window}, which {library} ignores; "
            "use a model of another family"
        )
    return window
