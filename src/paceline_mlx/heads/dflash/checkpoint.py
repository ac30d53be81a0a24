"""The shape and tensors of a DFlash checkpoint. `config_file` reads its config.json.

All faults of a checkpoint, and mismatches with the target, are reported in one error before
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
    """DFlash 2's convolution of a sublayer's input and output over the rows of the block.

    output[i] = sum over t of (base[t] + dynamic[i, t]) * input[i - t]. Rows before the block are 0.
    `dynamic` is a projection of the sublayer's input, shared by the channels of a group.
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
    """A correction of each draft's logits by the previous draft, which a block's rows do not see.

    For the previous draft p and a row's output h, the logit of candidate c (one of the row's best
    `candidates`) grows by <A[p] * H h, B[c]> for `selector` (DFlash 2), else by <W1[p], W2[c]>
    (DSpark's Markov head). `gated` gates W1[p] by h; `rnn` replaces it with an RNN cell's output.
    """

    kind: Literal["selector", "vanilla", "gated", "rnn", "none"]
    rank: int
    candidates: int
    confidence: bool = False
    """True if a separate head estimates the probability of a draft (DSpark)."""
    confidence_reads_draft: bool = False
    """True if that head also reads the previous draft's embedding."""

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
    """Rows per block: the last token, then masks."""
    mask_token_id: int
    windows: tuple[int | None, ...]
    """Sliding window of each layer, in tokens; None: full attention."""
    causal: bool | None = None
    """True if rows of a block attend only to earlier rows; None: in layers with a window."""
    first_drafted: int = 1
    """First row of a block whose output is a draft. 0 (DSpark): row i drafts the token after it;
    1: row i drafts the token at its own position."""
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    """Logits are cap * tanh(logits / cap)."""
    convolution: Convolution | None = None
    chain: Chain | None = None

    def is_causal(self, window: int | None) -> bool:
        """Return whether layers with this window are causal inside a block."""
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
        """Raise ModelError if tensors, of MLX or torch, have wrong shapes or are not finite."""
        check_tensors(folder, self.shapes(), tensors)


def read_tensors(folder: Path, config: Config) -> dict[str, Array]:
    """Return the tensors of the network and its chain, by name without the prefix `model.`.

    Others, such as DSpark's copies of the target's embeddings and head, are not read. Raises
    ModelError with the names of faulty tensors.
    """
    stored = stored_tensors(folder)
    tensors = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    config.check(folder, tensors)
    return {name: tensors[name] for name in config.shapes()}
