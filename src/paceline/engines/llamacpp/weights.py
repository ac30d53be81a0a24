"""Types of weights that the libraries compute right: equal rows are not yet right rows.

Compared with the same weights as F32, at widths of 576 to 9,728 and calls of 1 to 64 rows
(tests/engines/test_llamacpp_weights.py): KL 0.0002 to 0.001, what rounded activations make, but for
one fault. ik_llama.cpp 0.1.5 packs Q4_1 and Q5_1 anew for calls of 32 rows and more, four groups at
a time, and reads beyond a row whose groups are no multiple of four: KL 0.7 at 576 inputs.
"""

from collections.abc import Iterable

from paceline.errors import ModelError
from paceline.storage.gguf_file import Tensor, short

COMPARED = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)
"""Types that were compared; others are not run."""

_PACKED = ("Q4_1", "Q5_1")
_GROUP, _PACKED_GROUPS = 32, 4

_RIGHT_ROWS = 16
"""Most rows of a call that computes a packed type right at any width."""


def most_rows(name: str, tensors: Iterable[Tensor]) -> int | None:
    """Most rows of a call that computes all tensors right; None: any number.

    Raises ModelError for a type that was not compared. `name` is the file's, for the message.
    """
    from gguf import GGMLQuantizationType

    most = None
    for tensor in tensors:
        kind = GGMLQuantizationType(tensor.kind).name
        if kind not in COMPARED:
            raise ModelError(
                f"{name} has weights of type {kind} ({short(tensor.name)}), which were not "
                f"compared in the engine llamacpp; expected {', '.join(COMPARED)}: get the model "
                "in another quantization, such as Q4_K_M"
            )
        if kind in _PACKED and tensor.shape[-1] // _GROUP % _PACKED_GROUPS:
            most = _RIGHT_ROWS
    return most
