"""Every family in the Neural Engine's layout against transformers, on random tiny checkpoints."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

# Tensors this small are computed by one thread before a second has begun.
torch.set_num_threads(1)

from paceline.errors import ModelError  # noqa: E402
from paceline.tools.coreml.families import open_family  # noqa: E402
from paceline.tools.coreml.family import Family  # noqa: E402
from paceline.tools.coreml.torch_model import TorchModel  # noqa: E402
from support.programs import faults  # noqa: E402

pytestmark = pytest.mark.coreml

SLOTS, ROWS = 64, 4
VOCAB = 160

LLAMA = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Rows of 12 turn of the 16 of a head.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [3.0, 4.0, 6.0, 9.0, 12.0, 20.0],
}
PHI3 = {
    **LLAMA,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "pad_token_id": None,
    "original_max_position_embeddings": SLOTS,
}
LFM2 = {
    **LLAMA,
    "num_hidden_layers": 4,
    "block_multiple_of": 16,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
}
LFM2_MOE = {
    **LLAMA,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "num_dense_layers": 1,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", LLAMA),
    "llama, tied, with a head size of its own": (
        "LlamaForCausalLM",
        {**LLAMA, "tie_word_embeddings": True, "head_dim": 12},
    ),
    "llama 3's long context": ("LlamaForCausalLM", {**LLAMA, "rope_parameters": LLAMA3_ROPE}),
    "llama with biases": ("LlamaForCausalLM", {**LLAMA, "attention_bias": True}),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "head_dim": 16}),
    "qwen3, tied, with biases, each head with its keys": (
        "Qwen3ForCausalLM",
        {
            **LLAMA,
            "head_dim": 8,
            "num_key_value_heads": 6,
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
    ),
    "qwen3 with yarn": ("Qwen3ForCausalLM", {**LLAMA, "head_dim": 8, "rope_parameters": YARN}),
    "qwen3 with a window that no text is longer than": (
        "Qwen3ForCausalLM",
        {
            **LLAMA,
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": SLOTS,
            "max_window_layers": 1,
        },
    ),
    "phi-3": ("Phi3ForCausalLM", PHI3),
    "phi-4-mini": (
        "Phi3ForCausalLM",
        {
            **PHI3,
            "rope_parameters": LONGROPE,
            "tie_word_embeddings": True,
            "sliding_window": 4 * SLOTS,
        },
    ),
    "phi-4-mini, one group, with an attention factor": (
        "Phi3ForCausalLM",
        {
            **PHI3,
            "num_key_value_heads": 1,
            "rope_parameters": {**LONGROPE, "attention_factor": 1.5},
        },
    ),
    "phi-3, of which half turns": (
        "Phi3ForCausalLM",
        {**PHI3, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", {**LLAMA, "head_dim": 16}),
    "hunyuan with alpha, tied": (
        "HunYuanDenseV1ForCausalLM",
        {
            **LLAMA,
            "head_dim": 8,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0},
        },
    ),
    "hunyuan with biases": (
        "HunYuanDenseV1ForCausalLM",
        {**LLAMA, "head_dim": 8, "attention_bias": True, "num_key_value_heads": 3},
    ),
    "lfm2": ("Lfm2ForCausalLM", LFM2),
    "lfm2 with biases, a longer convolution and feed-forwards as they are said": (
        "Lfm2ForCausalLM",
        {
            **LFM2,
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2 with a convolution of two, and feed-forwards made wider": (
        "Lfm2ForCausalLM",
        {**LFM2, "conv_L_cache": 2, "block_ffn_dim_multiplier": 1.3},
    ),
    "lfm2 of convolutions": ("Lfm2ForCausalLM", {**LFM2, "layer_types": ["conv"] * 4}),
    "lfm2 of attention": (
        "Lfm2ForCausalLM",
        {**LFM2, "layer_types": ["full_attention"] * 4, "num_key_value_heads": 6},
    ),
    "lfm2 with experts": ("Lfm2MoeForCausalLM", LFM2_MOE),
    "lfm2 with experts, one of them, without a bias": (
        "Lfm2MoeForCausalLM",
        {**LFM2_MOE, "num_experts_per_tok": 1, "use_expert_bias": False, "num_dense_layers": 0},
    ),
    "lfm2 with experts, three of them, not to a sum of one, scaled": (
        "Lfm2MoeForCausalLM",
        {
            **LFM2_MOE,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.5,
        },
    ),
    "lfm2 with experts, four of them, with biases": (
        "Lfm2MoeForCausalLM",
        {**LFM2_MOE, "num_experts_per_tok": 4, "conv_bias": True, "tie_word_embeddings": False},
    ),
}


class Made:
    """A checkpoint on disk, and transformers' own model of it."""

    def __init__(self, form: str, folder: Path) -> None:
        name, settings = FORMS[form]
        model_class = getattr(transformers, name)
        torch.manual_seed(0)
        self.model = model_class(model_class.config_class(**settings)).eval().float()
        with torch.no_grad():
            for name, weight in [*self.model.named_parameters(), *self.model.named_buffers()]:
                # Norms and biases are all 1 or 0 at first, which would hide one that is not read.
                if weight.dim() == 1 and "inv_freq" not in name:
                    weight.add_(torch.randn_like(weight) * 0.2)
                elif name.endswith("conv.weight"):
                    weight.normal_(std=0.7)
                elif weight.dim() > 1:
                    weight.mul_(3)
        self.model.save_pretrained(folder)
        self.folder, self.lags = folder, settings.get("conv_L_cache", 3) - 1

    def family(self) -> Family:
        return open_family(self.folder, slots=SLOTS, conv_slots=ROWS + self.lags)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        with torch.no_grad():
            ran = self.model(torch.tensor([list(tokens)]), use_cache=False)
        found: np.ndarray = ran.logits[0].numpy()
        return found


@pytest.fixture(scope="module", params=FORMS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(request.param, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def network(made: Made) -> TorchModel:
    return TorchModel(made.family(), slots=SLOTS, rows=ROWS)


@pytest.fixture(scope="module")
def text() -> list[int]:
    return np.random.default_rng(0).integers(0, VOCAB, 23).tolist()


def run(network: TorchModel, tokens: Sequence[int], blocks: Callable[[int], int]) -> np.ndarray:
    """Logits of every token, in blocks of `blocks(number)` rows."""
    found: list[np.ndarray] = []
    at = number = 0
    while at < len(tokens):
        block = tokens[at : at + blocks(number)]
        found.append(network.step(block).logits)
        network.keep(len(block))
        at, number = at + len(block), number + 1
    return np.concatenate(found)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_logits_are_those_of_transformers_for_every_block_length(
    made: Made, network: TorchModel, text: list[int], rows: int
):
    found = run(network, text, lambda _: rows)
    np.testing.assert_allclose(found, made.logits(text), atol=1e-4, rtol=1e-4)


def test_a_prompt_in_blocks_and_then_single_tokens(
    made: Made, network: TorchModel, text: list[int]
):
    found = run(network, text, lambda number: ROWS if number < 3 else 1)
    np.testing.assert_allclose(found, made.logits(text), atol=1e-4, rtol=1e-4)


def test_rows_that_were_not_kept_leave_no_trace(made: Made, network: TorchModel, text: list[int]):
    expected = made.logits(text)
    at = 0
    while at < len(text):
        kept = 1 + at % 3
        block = [*text[at : at + kept], *[7] * (ROWS - kept)][:ROWS]
        found = network.step(block).logits
        here = min(kept, len(text) - at)
        np.testing.assert_allclose(found[:here], expected[at : at + here], atol=1e-4, rtol=1e-4)
        network.keep(here)
        at += here


def test_a_call_may_be_filled_up(made: Made, network: TorchModel, text: list[int]):
    expected = made.logits(text)
    for at, token in enumerate(text):
        found = network.step([token], width=ROWS).logits
        np.testing.assert_allclose(found[0], expected[at], atol=1e-4, rtol=1e-4)
        network.keep(1)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another activation": ("LlamaConfig", {**LLAMA, "hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "biases in a feed-forward": ("LlamaConfig", {**LLAMA, "mlp_bias": True}, "mlp_bias True"),
    "frequencies that change with a text's length": (
        "LlamaConfig",
        {**LLAMA, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_type 'dynamic'.*'default' or 'linear'",
    ),
    "a part that turns, where transformers has none": (
        "LlamaConfig",
        {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}
        | {"partial_rotary_factor": 0.5},
        "partial_rotary_factor 0.5",
    ),
    "a window shorter than a text": (
        "Qwen3Config",
        {**LLAMA, "use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
        "sliding_window 40.*64 slots.*at most 40 slots",
    ),
    "layers of another type": (
        "Qwen3Config",
        {**LLAMA, "layer_types": ["full_attention", "full_attention", "chunked_attention"]},
        "layer_types .*chunked_attention",
    ),
    "longrope in texts of two kinds": (
        "Phi3Config",
        {**PHI3, "rope_parameters": LONGROPE, "original_max_position_embeddings": SLOTS - 1},
        "original_max_position_embeddings 63.*64 slots.*Choose at most 63 slots",
    ),
    "a window of all layers": ("Phi3Config", {**PHI3, "sliding_window": 63}, "at most 63 slots"),
    "dynamic without alpha": (
        "HunYuanDenseV1Config",
        {**LLAMA, "head_dim": 8, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "alpha None",
    ),
    "no size of a head": ("HunYuanDenseV1Config", LLAMA, "head_dim None"),
    "a convolution of one": ("Lfm2Config", {**LFM2, "conv_L_cache": 1}, "conv_L_cache 1"),
    "convolutions of another kind": (
        "Lfm2Config",
        {**LFM2, "layer_types": ["conv", "conv", "sliding_attention", "conv"]},
        "layer_types .*sliding_attention.*'full_attention' or 'conv'",
    ),
    "more experts than there are": (
        "Lfm2MoeConfig",
        {**LFM2_MOE, "num_experts_per_tok": 7},
        "num_experts_per_tok 7.*6 experts",
    ),
    "layers that are not said": (
        "Lfm2MoeConfig",
        {**LFM2_MOE, "layer_types": None},
        "layer_types .*4 of 'full_attention' or 'conv'",
    ),
}


@pytest.mark.parametrize("form", REFUSED)
def test_what_is_not_done_is_refused(form: str, tmp_path: Path):
    name, settings, message = REFUSED[form]
    getattr(transformers, name)(**settings).save_pretrained(tmp_path)
    safetensors_torch.save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        open_family(tmp_path, slots=SLOTS, conv_slots=ROWS + 2)


@pytest.mark.parametrize(
    ("form", "layer"),
    [
        ("llama", 0),
        ("qwen3", 1),
        ("phi-4-mini", 0),
        ("hunyuan with alpha, tied", 2),
        ("lfm2", 0),
        ("lfm2", 2),
        ("lfm2 with experts", 1),
        ("lfm2 with experts, three of them, not to a sum of one, scaled", 2),
    ],
)
def test_a_layer_is_converted(form: str, layer: int, tmp_path: Path):
    pytest.importorskip("coremltools")
    from paceline.tools.coreml.shards import Sizes, convert_layers

    made = Made(form, tmp_path)
    sizes = Sizes(rows=ROWS, slots=SLOTS, conv_slots=ROWS + made.lags)
    model = convert_layers(made.family(), layer, layer + 1, sizes=sizes)
    assert faults(model._mil_program) == []
