"""Reads a DFlash checkpoint, z-lab's DFlash, DFlash 2, or DSpark: its shape and its tensors.

The fields of `config.json` mean the same as in the original code: z-lab/dflash (dflash/model.py)
and deepseek-ai/DeepSpec (deepspec/modeling/dspark/qwen3). Layers with a sliding window are causal
in a block unless `is_causal` is false, as in vLLM (model_executor/models/qwen3_dflash.py).

All faults of a checkpoint, and mismatches with the target, are reported in one error before
anything is computed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from paceline.errors import ModelError
from paceline.storage.files import read_json
from paceline.storage.validation import Count, Limit, Positive, list_faults, validated
from paceline_mlx.heads.config import (
    CONFIG,
    DrafterFile,
    HeadConfig,
    One,
    PositiveFloat,
    architecture,
    with_fields_of,
)
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
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    """Factor of the logits."""
    final_logit_softcapping: float | None = None
    """Logits are then cap * tanh(logits / cap); None or 0: they are not changed."""
    convolution: Convolution | None = None
    chain: Chain | None = None

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


FORMS = {
    "DFlashDraftModel": "DFlash",
    "DFlash2DraftModel": "DFlash 2",
    "Qwen3DSparkModel": "DSpark",
}

_NotEmpty = Limit(min_length=1)
_Block = Annotated[int, Limit(ge=2)]

_CANDIDATES = 256
"""Number of a row's best tokens that DSpark's Markov head scores. More would read its whole output
matrix once per draft; vLLM has the same limit (`dspark_draft_topk`)."""


@dataclass(kw_only=True)
class _File(DrafterFile):
    architectures: Annotated[
        list[Literal["DFlashDraftModel", "DFlash2DraftModel", "Qwen3DSparkModel"]], _NotEmpty
    ]
    num_key_value_heads: Positive
    num_hidden_layers: Positive
    num_target_layers: Positive
    partial_rotary_factor: One = 1.0
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    sliding_window: int | None = None
    is_causal: bool | None = None
    is_neox_style: Literal[True] | None = None


@dataclass(kw_only=True)
class _DFlashConfig:
    target_layer_ids: Annotated[list[Count], _NotEmpty]
    mask_token_id: Count
    causal: bool | None = None
    input_embedding_scale: PositiveFloat = 1.0
    output_multiplier: PositiveFloat = 1.0
    final_logit_softcapping: Annotated[float, Limit(ge=0)] | None = None
    use_swa: Literal[False] | None = None
    attention_sink_bias: Literal[False] | None = None


@dataclass(kw_only=True)
class _DFlash2Config(_DFlashConfig):
    block_size: _Block
    conv_kernel_size: Positive
    conv_group_size: Positive
    selector_rank: Positive
    selector_top_k: Positive


@dataclass(kw_only=True)
class _DFlashFile(_File):
    block_size: _Block
    dflash_config: _DFlashConfig


@dataclass(kw_only=True)
class _DFlash2File(_File):
    dflash_config: _DFlash2Config


@dataclass(kw_only=True)
class _DSparkFile(_File):
    block_size: _Block
    target_layer_ids: Annotated[list[Count], _NotEmpty]
    mask_token_id: Count
    markov_rank: Count
    markov_head_type: Literal["vanilla", "gated", "rnn"] | None = None
    enable_confidence_head: bool
    confidence_head_with_markov: bool = False


def read_config(folder: Path) -> Config:
    """Read and validate `config.json`.

    Raises ModelError if this is not a DFlash checkpoint, or if its format is not supported; the
    message lists every fault.
    """
    path = folder / CONFIG
    raw, name = read_json(path), architecture(folder)
    if name == "Qwen3DSparkModel":
        return _dspark(path, raw)
    if name == "DFlash2DraftModel":
        dflash2 = validated(_DFlash2File, raw, str(path), error=ModelError)
        nested = dflash2.dflash_config
        convolution = Convolution(nested.conv_kernel_size, nested.conv_group_size)
        faults = []
        if dflash2.hidden_size % convolution.group:
            faults.append(f"conv_group_size {convolution.group} does not divide hidden_size")
        if convolution.taps > nested.block_size:
            faults.append(f"conv_kernel_size {convolution.taps} > block_size {nested.block_size}")
        if nested.selector_top_k > dflash2.vocab_size:
            faults.append(f"selector_top_k {nested.selector_top_k} is larger than the vocabulary")
        chain = Chain("selector", nested.selector_rank, nested.selector_top_k)
        return _config(path, dflash2, nested, faults, convolution=convolution, chain=chain)
    file = validated(_DFlashFile, raw, str(path), error=ModelError)
    return _config(path, file, file.dflash_config, [])


def _dspark(path: Path, raw: object) -> Config:
    file = validated(_DSparkFile, raw, str(path), error=ModelError)
    reads_draft = file.enable_confidence_head and file.confidence_head_with_markov
    faults = []
    if file.markov_rank and file.markov_head_type is None:
        faults.append(f"markov_rank is {file.markov_rank} without a markov_head_type")
    if reads_draft and not file.markov_rank:
        faults.append("confidence_head_with_markov needs a markov_rank above 0")
    chain = None
    if file.markov_rank or file.enable_confidence_head:
        chain = Chain(
            (file.markov_head_type or "vanilla") if file.markov_rank else "none",
            file.markov_rank,
            min(_CANDIDATES, file.vocab_size),
            confidence=file.enable_confidence_head,
            confidence_reads_draft=reads_draft,
        )
    file.is_causal = False  # if set, it describes the target; DSpark's code ignores it
    return _config(path, file, file, faults, first_drafted=0, chain=chain)


def _config(
    path: Path, file: _File, drafts: _DFlashConfig | _DSparkFile, faults: list[str], **values: Any
) -> Config:
    """Return the config in a file. Raises ModelError if its values contradict each other.

    `drafts` has the fields for drafts: the file, or an object in it.
    """
    faults, layers = faults + file.head_faults(), file.num_hidden_layers
    last_tap, mask = max(drafts.target_layer_ids), drafts.mask_token_id
    if last_tap >= file.num_target_layers:
        faults.append(f"layer {last_tap} is tapped; the target has {file.num_target_layers} layers")
    if mask >= file.vocab_size:
        faults.append(f"mask_token_id is {mask}; the vocabulary has {file.vocab_size} tokens")
    kinds = file.layer_types if file.layer_types is not None else ["full_attention"] * layers
    if len(kinds) != layers:
        faults.append(f"layer_types has {len(kinds)} entries, not {layers}")
    if "sliding_attention" in kinds and not (file.sliding_window or 0) > 0:
        faults.append(f"sliding_window is {file.sliding_window} for sliding_attention")
    if faults:
        raise ModelError(list_faults(str(path), faults))
    windows = [file.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    values |= {"taps": tuple(drafts.target_layer_ids), "windows": tuple(windows)}
    if file.is_causal is not None:
        values["causal"] = file.is_causal
    return with_fields_of(Config, file, drafts, **file.settings(), **values)


def read_tensors(folder: Path, config: Config) -> dict[str, Array]:
    """Return the tensors of the network and its chain, by name without the prefix `model.`.

    Others, such as DSpark's copies of the target's embeddings and head, are not read. Raises
    ModelError with the names of faulty tensors.
    """
    stored = stored_tensors(folder)
    tensors = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    config.check(folder, tensors)
    return {name: tensors[name] for name in config.shapes()}
