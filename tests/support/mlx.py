"""Random tiny checkpoints of several families, as mlx-lm and transformers read them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import paceline
from paceline.engines import EngineSettings
from paceline.engines.base import Engine
from paceline.engines.rows import RowRange, RowRules
from paceline.runtime.model import Model
from paceline.storage.files import read_json, write_json
from support import coreml_families
from support.coreml_checkpoints import write_tokenizer

Opened = Callable[..., Any]
Checkpoints = Callable[..., Path]

VOCAB = 160
CONTEXT = 512
CONFIG = "config.json"

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


heads, whole = coreml_families.heads, coreml_families.whole

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", heads(8, 2, 64)),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", heads(4, 2, 128)),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", whole(4, 2, 16)),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM", heads(8, 2, 128)),
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {
            **whole(4, 2, 16),
            **{"block_dim": 64, "block_multiple_of": 16},
            "layer_types": ["conv", "full_attention"],
        },
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {
            **heads(8, 2, 256),
            "full_attention_interval": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**heads(4, 1, 256), "sliding_window": 24, "sliding_window_pattern": 2},
    ),
}
"""Transformers' classes, and settings in addition to the common ones."""


class Case(NamedTuple):
    """A model and how it is run, for tests that every engine must pass."""

    family: str
    dtype: str = "float32"
    bits: int | None = None
    rows: tuple[int, int] | None = None
    """Minimum and maximum rows of a forward pass; None: measured."""
    layers: int = 2


CASES = {
    "llama": Case("llama"),
    "qwen3": Case("qwen3", dtype="bfloat16", layers=1),
    "phi3": Case("phi3", bits=4, layers=1),
    "hunyuan": Case("hunyuan_v1_dense", rows=(8, 8), layers=1),
    "lfm2": Case("lfm2", rows=(2, 4)),
    "qwen3_5": Case("qwen3_5", bits=8, rows=(2, 8)),
}


def needs() -> None:
    """Skip the test, or the file, where MLX is not installed or what makes its checkpoints."""
    for module in ("mlx_lm", "torch", "transformers"):
        pytest.importorskip(module)


def engine(name: str, request: pytest.FixtureRequest, taps: tuple[int, ...] = ()) -> Engine:
    needs()
    from paceline_mlx.engine import MlxEngine

    case = CASES[name]
    work = request.getfixturevalue("tmp_path_factory").mktemp(f"mlx-{name}")
    folder = checkpoint(
        work / "checkpoint", case.family, dtype=case.dtype, num_hidden_layers=case.layers
    )
    if case.bits is not None:
        folder = quantized(folder, work / "quantized", bits=case.bits)
    settings = EngineSettings(cache_tokens=6 * CONTEXT, taps=taps)
    if case.rows is None:
        return MlxEngine(folder, CONTEXT, settings)
    return MlxEngine(folder, CONTEXT, settings, rules=rules(*case.rows, together=16))


def rules(least: int, most: int, *, prefill: int = 512, together: int = 1) -> RowRules:
    from paceline_mlx.thresholds import THRESHOLDS

    return RowRules(RowRange(least, most), RowRange(1, prefill), together=together, cuts=THRESHOLDS)


def checkpoint(folder: Path, family: str, *, dtype: str = "float32", **changes: Any) -> Path:
    """Write a random model whose weights all have an effect, with a tokenizer."""
    import torch
    import transformers

    config, model, settings = FAMILIES[family]
    torch.manual_seed(0)
    network: Any = getattr(transformers, model)(
        getattr(transformers, config)(**{**_SIZES, **settings, **changes})
    ).eval()
    with torch.no_grad():
        for weight in network.parameters():
            # Initial norms are 1, biases 0, and a random model's output barely varies by input.
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.2)
            else:
                weight.normal_(std=0.7) if weight.dim() == 3 else weight.mul_(3)
        _favour(network.get_input_embeddings().weight, network.get_output_embeddings().weight)
    network.to(getattr(torch, dtype)).save_pretrained(folder)
    if family == "qwen3_5":  # is published with its vision part, and a config around this one
        text = read_json(folder / CONFIG)
        about = {"model_type": family, "architectures": ["Qwen3_5ForConditionalGeneration"]}
        write_json(folder / CONFIG, {**about, "text_config": text})
    write_tokenizer(folder)
    return folder


def model(checkpoint: Path, cache: Path, *, cache_tokens: int = 4096) -> Model:
    template = "{% for message in messages %}{{ message.content }}.{% endfor %}"
    (checkpoint / "chat_template.jinja").write_text(template)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(cache))
        loaded = paceline.load(checkpoint, engine="mlx", cache_tokens=cache_tokens)
        loaded.exactness_report()
        return loaded


def _favour(embeddings: Any, head: Any) -> None:
    """Give each token a favourite after it, in rounds of four, so that texts come back."""
    import torch

    if head.data_ptr() == embeddings.data_ptr():
        head.normal_(std=0.03)  # each is its own
    else:
        tokens = torch.arange(VOCAB)
        embeddings.normal_(std=0.5)
        head.add_(0.08 * embeddings[tokens // 4 * 4 + (tokens - 1) % 4])


def quantized(
    checkpoint: Path,
    folder: Path,
    *,
    bits: int = 4,
    group_size: int = 32,
    mode: str = "affine",
    recipe: str | None = None,
) -> Path:
    """Save in mlx-lm's format, with matrices quantized alike or by a recipe, such as mixed_3_6.

    `bits` 0 quantizes none.
    """
    from mlx_lm.convert import mixed_quant_predicate_builder
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    model, config = load_model(checkpoint)
    chosen = recipe and mixed_quant_predicate_builder(recipe, model, group_size)
    if bits:
        model, config = quantize_model(
            model, config, group_size, bits, mode=mode, quant_predicate=chosen or None
        )
    folder.mkdir()
    save_model(folder, model)
    save_config(config, folder / "config.json")
    write_tokenizer(folder)
    return folder


def reference_logits(checkpoint: Path, family: str, tokens: Sequence[int]) -> np.ndarray:
    """[T, vocab]: what transformers computes for a whole text."""
    logits: np.ndarray = _reference(checkpoint, family, tokens).logits[0].float().numpy()
    return logits


def reference_taps(checkpoint: Path, family: str, tokens: Sequence[int]) -> list[np.ndarray]:
    """[T, d] after each layer but the last, which transformers gives normed."""
    states = _reference(checkpoint, family, tokens).hidden_states[1:-1]
    return [state[0].float().numpy() for state in states]


def _reference(checkpoint: Path, family: str, tokens: Sequence[int]) -> Any:
    import torch
    import transformers

    values = read_json(checkpoint / CONFIG)
    config = getattr(transformers, FAMILIES[family][0])(**values.get("text_config", values))
    model: Any = getattr(transformers, FAMILIES[family][1])
    model = model.from_pretrained(checkpoint, config=config).eval()
    with torch.no_grad():
        return model(torch.tensor([list(tokens)]), output_hidden_states=True)
