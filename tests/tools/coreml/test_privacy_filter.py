"""Privacy Filter in the Neural Engine's layout against transformers, on a tiny checkpoint."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")

from paceline.errors import ModelError  # noqa: E402
from paceline.tools.coreml.families import open_family  # noqa: E402
from paceline.tools.coreml.families.privacy_filter import PrivacyFilter  # noqa: E402
from paceline.tools.coreml.family import Family  # noqa: E402
from paceline.tools.coreml.torch_model import TorchClassifier, layer_inputs  # noqa: E402
from support.programs import faults, kinds  # noqa: E402

pytestmark = pytest.mark.coreml

SLOTS, VOCAB, REACH = 64, 160, 5

SETTINGS: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "num_local_experts": 12,
    "num_experts_per_tok": 4,
    "sliding_window": REACH,
    "pad_token_id": 0,
    "eos_token_id": 0,
    # Low enough for the experts' clamps to be reached.
    "swiglu_limit": 1.5,
    # Large enough that queries, keys and routers tell tokens apart.
    "initializer_range": 0.25,
}


class Made:
    """A checkpoint on disk, and transformers' own model of it."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        config = transformers.OpenAIPrivacyFilterConfig(**SETTINGS)
        model = transformers.OpenAIPrivacyFilterForTokenClassification(config).eval().float()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                # Norms and biases are all 1 or 0 at first, which would hide one that is not read.
                if weight.dim() == 1 or name.endswith("_bias"):
                    weight.add_(torch.randn_like(weight) * 0.3)
        model.save_pretrained(folder)
        self.folder, self.model = folder, model

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        with torch.no_grad():
            found: np.ndarray = self.model(torch.tensor([list(tokens)])).logits[0].numpy()
        return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("privacy-filter"))


@pytest.fixture(scope="module")
def family(made: Made) -> Family:
    return open_family(made.folder, slots=SLOTS, conv_slots=0)


@pytest.fixture(scope="module")
def classifier(family: Family) -> TorchClassifier:
    return TorchClassifier(family)


@pytest.fixture(scope="module")
def text() -> list[int]:
    return np.random.default_rng(0).integers(1, VOCAB, 40).tolist()


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)
    np.testing.assert_array_equal(found.argmax(-1), expected.argmax(-1))


def test_the_family_says_what_a_converter_needs(made: Made, family: Family):
    shape = family.shape
    assert (shape.task, shape.window, shape.lags) == ("token-classification", REACH, 0)
    assert shape.labels == tuple(made.model.config.id2label.values())
    assert "S-private_person" in shape.labels
    assert family.head() is None
    assert not list(family.layer(0).buffers()), "a layer that keeps nothing has states"


@pytest.mark.parametrize("length", [1, 2, 3, 4, REACH, 2 * REACH + 1, 40])
def test_labels_are_those_of_transformers_for_every_length(
    made: Made, classifier: TorchClassifier, text: list[int], length: int
):
    close(classifier.read([text[:length]]).logits, made.logits(text[:length]))


def test_a_row_sees_as_far_as_the_reach_on_both_sides(made: Made, text: list[int]):
    # With one layer, as rows of the second see what those of the first saw.
    family = open_family(made.folder, slots=SLOTS, conv_slots=0)
    family.shape = replace(family.shape, layers=1)
    one = TorchClassifier(family)
    first = one.read([text]).logits
    for token in (0, 20, 39):
        changed = [*text[:token], 1 + text[token] % (VOCAB - 1), *text[token + 1 :]]
        seen = np.abs(one.read([changed]).logits - first).max(-1) > 0
        assert seen.nonzero()[0].tolist() == [row for row in range(40) if abs(row - token) <= REACH]


def test_texts_of_one_call_do_not_see_each_other(
    made: Made, classifier: TorchClassifier, text: list[int]
):
    texts = [text[:9], text[9:10], text[10:33]]
    found = np.split(classifier.read(texts).logits, [9, 10])
    for here, one in zip(found, texts, strict=True):
        close(here, made.logits(one))


def test_a_call_may_be_filled_up(made: Made, classifier: TorchClassifier, text: list[int]):
    close(classifier.read([text[:7]], width=11).logits, made.logits(text[:7]))
    close(classifier.read([text[:40]], width=SLOTS + 50).logits, made.logits(text))


def test_logits_are_those_of_transformers_with_plain_rotary_embeddings(
    tmp_path: Path, text: list[int], monkeypatch: pytest.MonkeyPatch
):
    rope = {"rope_type": "default", "rope_theta": 1e4}
    monkeypatch.setitem(SETTINGS, "rope_parameters", rope)
    made = Made(tmp_path)
    family = open_family(made.folder, slots=SLOTS, conv_slots=0)
    assert family.rope_tables().cos.max() == 1
    close(TorchClassifier(family).read([text]).logits, made.logits(text))


def test_the_factor_of_long_context_is_in_the_tables(family: Family):
    assert family.rope_tables().cos.max() == pytest.approx(1.3466, abs=1e-4)


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("attention_bias", {"attention_bias": False}),
        (
            "rope_type",
            {
                "rope_parameters": {
                    "rope_type": "dynamic",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                }
            },
        ),
    ],
)
def test_what_is_not_implemented_is_refused(field: str, settings: dict[str, Any]):
    config = transformers.OpenAIPrivacyFilterConfig(**{**SETTINGS, **settings})
    with pytest.raises(ModelError, match=rf"{field}.*expected"):
        PrivacyFilter(config, {}, slots=SLOTS, conv_slots=0)


def test_a_layer_is_converted(family: Family):
    ct = pytest.importorskip("coremltools")

    class Shard(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = family.layer(0)

        def forward(self, hidden, cos, sin, mask):
            step = layer_inputs({"rope_cos": cos, "rope_sin": sin, "attn_mask": mask})
            return self.layer(hidden, step)

    def shapes(rows: Any) -> list[tuple[Any, ...]]:
        return [(1, 48, rows, 1), (rows, 8), (rows, 8), (1, 1, rows, rows)]

    with torch.no_grad():
        example = tuple(torch.zeros(shape) for shape in shapes(4))
        traced = torch.jit.trace(Shard().eval(), example, check_trace=False)
    names = ["hidden", "rope_cos", "rope_sin", "attn_mask"]
    rows = ct.RangeDim(1, 4, default=1)
    model = ct.convert(
        traced,
        inputs=[
            ct.TensorType(name=name, shape=shape, dtype=np.float16)
            for name, shape in zip(names, shapes(rows), strict=True)
        ],
        outputs=[ct.TensorType(name="out_hidden", dtype=np.float16)],
        minimum_deployment_target=ct.target.iOS18,
        compute_precision=ct.precision.FLOAT16,
        skip_model_load=True,
    )
    assert faults(model._mil_program) == []
    assert {"conv", "exp", "sigmoid"} <= kinds(model._mil_program)
    assert "read_state" not in kinds(model._mil_program)
