"""What a DFlash checkpoint computes: its shape, and its tensors. `config_file` reads config.json.

Every fault of a checkpoint, or of a drafter for another target, is named in one error before
anything is computed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline_mlx.heads.config import HeadConfig
from paceline_mlx.heads.weights import check_tensors, stored_tensors
from paceline_mlx.hooks import Array


@dataclass(frozen=True, slots=True)
class Convolution:
    """DFlash 2: a sublayer's input and output are convolved over the rows of the block.

    output[i] = sum over t of (base[t] + dynamic[i, t]) * input[i - t], rows before the block being
    0; `dynamic` is a projection of the sublayer's input, the same for the channels of a group.
    """

    taps: int
    group: int

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        return {
            name: shape
            for sublayer in ("attention_conv", "mlp_conv")
            for name, shape in (
                (f"{sublayer}.base_kernel", (2, self.taps, d)),
                (f"{sublayer}.kernel_projection.weight", (2 * self.taps * (d // self.group), d)),
            )
        }


@dataclass(frozen=True, slots=True)
class Chain:
    """How a draft depends on the one before it, which the rows of a block do not know.

    To the logits of a row's best `candidates` is added, for a draft p before it and a row's output
    h: `selector` (DFlash 2) <A[p] * H h, B[c]>; `vanilla`, `gated` and `rnn` (DSpark's Markov head)
    <W1[p], W2[c]>, where W1[p] is gated by h, or replaced by the output of a recurrent cell.
    """

    kind: Literal["selector", "vanilla", "gated", "rnn", "none"]
    rank: int
    candidates: int
    confidence: bool = False
    """Whether the chance of a draft comes from a head of its own (DSpark)."""
    confidence_reads_draft: bool = False
    """Whether that head reads the embedding of the draft before, too."""

    def shapes(self, d: int, vocab_size: int) -> dict[str, tuple[int, ...]]:
        r = self.rank
        shapes: dict[str, tuple[int, ...]] = {}
        if self.kind == "selector":
            shapes = {
                "candidate_selector.predecessor_codebook": (vocab_size, r),
                "candidate_selector.successor_codebook": (vocab_size, r),
                "candidate_selector.hidden_projection.weight": (r, d),
            }
        elif self.kind != "none":
            shapes = {
                f"markov_head.markov_{matrix}.weight": (vocab_size, r) for matrix in ("w1", "w2")
            }
        if self.kind == "gated":
            shapes["markov_head.gate_proj.weight"] = (r, d + r)
            shapes["markov_head.gate_proj.bias"] = (r,)
        if self.kind == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * r, 2 * r + d)
            shapes["markov_head.joint_proj.bias"] = (3 * r,)
        if self.confidence:
            width = d + r if self.confidence_reads_draft else d
            shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
        return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(HeadConfig):
    num_hidden_layers: int
    block_size: int
    """Rows of a block: the last token, then masks."""
    mask_token_id: int
    windows: tuple[int | None, ...]
    """Sliding windows of the layers, in tokens; None: full attention."""
    causal: bool | None = None
    """Whether a row of a block attends to earlier rows alone; None: in layers with a window."""
    first_drafted: int = 1
    """First row of a block whose output is a draft. 0 (DSpark): row i drafts the token after it;
    1: the token in its own place."""
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    """Logits are cap * tanh(logits / cap)."""
    convolution: Convolution | None = None
    chain: Chain | None = None

    def is_causal(self, window: int | None) -> bool:
        """Whether layers with this window are causal inside a block."""
        return window is not None if self.causal is None else self.causal

    def shapes(self) -> dict[str, tuple[int, ...]]:
        d = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (d, self.tapped_size),
            "hidden_norm.weight": (d,),
            "norm.weight": (d,),
        }
        layer = self.layer_shapes(d)
        if self.convolution is not None:
            layer |= self.convolution.shapes(d)
        for number in range(self.num_hidden_layers):
            shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
        if self.chain is not None:
            shapes |= self.chain.shapes(d, self.vocab_size)
        return shapes

    def check(self, folder: Path, tensors: Mapping[str, Any]) -> None:
        """Raise ModelError if its tensors, in MLX or torch, are of other shapes or not finite."""
        check_tensors(folder, self.shapes(), tensors)


def read_tensors(folder: Path, config: Config) -> dict[str, Array]:
    """The tensors of the network and of its chain, by name without the prefix `model.`.

    Others, such as DSpark's copies of the target's embeddings and head, are not read. Raises
    ModelError; the message names faulty tensors.
    """
    stored = stored_tensors(folder)
    tensors = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    config.check(folder, tensors)
    return {name: tensors[name] for name in config.shapes()}
