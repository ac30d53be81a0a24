"""What we convert breaks no firm rule, whatever family it is of."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("coremltools")

torch.set_num_threads(1)

from paceline.tools.coreml.compress import compress  # noqa: E402
from paceline.tools.coreml.families import open_family  # noqa: E402
from paceline.tools.coreml.lint import lint  # noqa: E402
from paceline.tools.coreml.shards import (  # noqa: E402
    Sizes,
    convert_head,
    convert_layers,
    shapes_of,
    static_functions,
)

pytestmark = pytest.mark.coreml

SIZES = Sizes(rows=4, slots=64, conv_slots=8)

ALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "phi3": ("Phi3ForCausalLM", {"original_max_position_embeddings": 64}),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", {"head_dim": 16}),
    "lfm2": ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        {
            "layer_types": ["conv", "full_attention"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        },
    ),
    "zaya": (
        "ZayaForCausalLM",
        {
            "head_dim": 16,
            "moe_intermediate_size": 64,
            "num_experts": 4,
            "router_hidden_size": 32,
        },
    ),
    "privacy_filter": (
        "OpenAIPrivacyFilterForTokenClassification",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "eos_token_id": 0,
        },
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    name, settings = MODELS[request.param]
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**{**ALL, **settings})).eval()
    with torch.no_grad():
        for weight in model.parameters():
            # Biases that are all 0 would be left out.
            weight.add_(torch.randn_like(weight) * 0.1)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return open_family(folder, slots=SIZES.slots, conv_slots=SIZES.conv_slots)


@pytest.fixture(scope="module")
def packages(family: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Coremltools' models of all layers and of the head, without compression."""
    size = family.shape.vocab_size if family.head() is not None else len(family.shape.labels)
    return {
        "layers": convert_layers(family, 0, family.shape.layers, sizes=SIZES),
        "head": convert_head(family, 0, size, sizes=SIZES),
    }


def broken(path: Path) -> list[str]:
    """The firm rules, and those that say that rows could not be followed."""
    return [
        f"{one.rule} {one.where}: {one.what}"
        for one in lint(path)
        if one.verdict == "fail" or one.rule in ("row-order-unknown", "cast", "unknown-operation")
    ]


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("part", ["layers", "head"])
def test_what_we_convert_breaks_no_firm_rule(
    packages: dict[str, Any], part: str, form: str, tmp_path: Path
):
    compress(packages[part], form).save(str(tmp_path / "model.mlpackage"))
    assert broken(tmp_path / "model.mlpackage") == []


@pytest.mark.parametrize(
    "family", ["lfm2", "privacy_filter"], indirect=True, scope="module"
)  # these two have every kind of input
def test_functions_for_so_many_rows_break_none_either(
    family: Any, packages: dict[str, Any], tmp_path: Path
):
    packages["layers"].save(str(tmp_path / "flexible.mlpackage"))
    shapes = {rows: shapes_of(family, SIZES, rows, head=False) for rows in (1, 4)}
    static_functions(tmp_path / "flexible.mlpackage", shapes, tmp_path / "static.mlpackage")
    assert broken(tmp_path / "static.mlpackage") == []
