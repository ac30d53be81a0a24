"""DFlash: a drafter that fills a block of masks, and reads its target's hidden states.

Each forward pass has 2 T rows. The first T are new context rows, computed from the target's hidden
states. The others are the block `[last token, mask, ...]`, whose keys and values go to T slots of
their own, after the context's (arXiv 2602.06036):

    row          first layer's input              keys computed from     added by each layer
    context      [0, tapped hidden states]        the row                nothing
    block        [embedding, 0]                   the normed row         attention, feed-forward

The mask from `engine.drafter` lets every row attend to the context and the whole block.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from paceline.drafters.heads import check_fits, sizes_of
from paceline.errors import InvalidRequest, ModelError
from paceline.plugins import DRAFTERS, load
from paceline_coreml.conversion.checkpoint import FolderTensors, Prefixed
from paceline_coreml.conversion.decoder import Layer, linear
from paceline_coreml.conversion.families.llama import HeadNorms, decoder
from paceline_coreml.conversion.family import Family
from paceline_coreml.conversion.layers import LayerInputs, RMSNorm
from paceline_coreml.engine.artifact import Drafts
from paceline_coreml.options import ConversionOptions

CONSTANTS = {"model_type": "dflash", "hidden_act": "silu"}
"""Fields of a model's config that are missing in a drafter's."""

_ENDS = ("embed_tokens.weight", "lm_head.weight")
"""Tensors of the target that a drafter uses, without their prefix."""


def open_drafter(
    folder: Path, target: Path, options: ConversionOptions
) -> tuple[Family, ConversionOptions]:
    """Open the drafter in `folder` for the model in `target`; `options.rows` is its block size.

    Also returns the options with the rows per forward pass, twice the block size.

    Raises:
        ModelError: the drafter is for another target, corrupt, or in an unsupported format.
        InvalidRequest: an option is not for drafters, or the block is too long.
    """
    if options.flexible or options.functions or options.taps or options.routing:
        raise InvalidRequest(
            "flexible, functions, taps and routing cannot be used with a drafter, which has one "
            "function; remove them, and set --rows instead"
        )
    # Heads for MLX read the same files.
    config = load(DRAFTERS, "mlx.dflash").read(folder)
    block = options.rows or config.block_size
    if block > config.block_size:
        raise InvalidRequest(
            f"rows is {block}; {folder} was trained with blocks of {config.block_size}; choose "
            f"at most {config.block_size}"
        )
    scales = config.input_embedding_scale, config.output_multiplier
    is_scaled = scales != (1, 1) or config.final_logit_softcapping
    if config.chain or any(config.windows) or config.causal or is_scaled:
        raise ModelError(
            f"{folder} has a chain of drafts (DFlash 2, DSpark), a sliding window, causal blocks, "
            "or scaled embeddings or logits; Core ML supports only plain DFlash"
        )
    check_fits(folder, config.facts("", ""), sizes_of(target)[0])
    weights = _Tensors(folder, target, (config.vocab_size, config.hidden_size))
    config.check(folder, weights.own)
    dims = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    frequencies = config.rope_theta ** (-dims / config.head_dim)
    if config.llama3_rope is not None:
        periods = config.llama3_rope.periods(config.head_dim, config.rope_theta)
        frequencies = 1 / torch.from_numpy(periods).double()
    opened = decoder(
        SimpleNamespace(**asdict(config), **CONSTANTS, tie_word_embeddings=weights.tied),
        weights,
        options.slots + block,
        SimpleNamespace(inv_freq=frequencies, attention_scaling=1.0),
        norms=HeadNorms("q_norm", "k_norm"),
        wrap=lambda index, layer: BlockLayer(
            layer, block, None if index else weights.own, config.rms_norm_eps
        ),
    )
    drafts = Drafts(config.taps, config.mask_token_id, config.num_target_layers)
    size = config.hidden_size + config.tapped_size
    opened.shape = replace(opened.shape, task="draft", input_size=size, drafts=drafts)
    return opened, replace(options, rows=2 * block, functions=(2 * block,))


class _Tensors(Mapping[str, Tensor]):
    """A drafter's tensors and its target's embeddings and head, with a decoder's names."""

    def __init__(self, folder: Path, target: Path, shape: tuple[int, int]) -> None:
        """Open the files; `shape` is that of the target's embeddings and head."""
        tensors = FolderTensors(folder)
        self.own = Prefixed(tensors, "" if "fc.weight" in tensors else "model.")
        self._target = FolderTensors(target)
        ends = [name for name in self._target if name.endswith(_ENDS)]
        self._target.expect(dict.fromkeys(ends, shape))
        self.tied = not any(name.endswith(_ENDS[1]) for name in ends)

    def __getitem__(self, name: str) -> Tensor:
        end = name.removeprefix("model.")
        if end not in _ENDS:
            return self.own[end]
        return self._target[next((one for one in self._target if one.endswith(end)), name)]

    def __iter__(self) -> Iterator[str]:
        return (f"model.{name}" for name in self.own)

    def __len__(self) -> int:
        return len(self.own)


class BlockLayer(nn.Module):
    """A decoder layer that changes only the block's rows; see the top of this file."""

    def __init__(
        self, layer: Layer, block: int, fused: Mapping[str, Tensor] | None, eps: float
    ) -> None:
        """Wrap a layer; the first one has tensors, `fused`, that compute the context's rows."""
        super().__init__()
        self.layer, self.fc = layer, None
        if fused is not None:
            self.fc, self.norm = linear(fused, "fc"), RMSNorm(fused["hidden_norm.weight"], eps)
        rows = torch.arange(2 * block).ge(block).float().view(1, 1, -1, 1)
        self.block = nn.Parameter(rows, requires_grad=False)

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        layer = self.layer
        if self.fc is not None:
            size = self.fc.out_channels
            x = x[:, :size] + self.norm(self.fc(x[:, size:]))
        normed = layer.before(x) * self.block + x * (1 - self.block)
        x = x + layer.mix(normed, inputs) * self.block
        return x + layer.feed_forward(layer.between(x)) * self.block
