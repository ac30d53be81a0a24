"""The GGUF file of a repository that a name selects."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ModelError, ModelNotFound
from paceline.models.names.hub_names import (
    choose,
    is_exact,
    is_model,
    models_of,
    parse_hub_name,
    quantization,
    shard_of,
    shards_of,
    tag_of,
)
from support.errors import raises

REPOSITORY = "owner/name"
MANY = [
    "README.md",
    "config.json",
    "imatrix.gguf",
    "mmproj-BF16.gguf",
    "mmproj-model-f16.gguf",
    "mtp-model-Q4_K_M.gguf",
    "model-BF16-00001-of-00002.gguf",
    "model-BF16-00002-of-00002.gguf",
    "model-IQ4_XS.gguf",
    "model-Q4_0.gguf",
    "model-Q4_K_M.gguf",
    "model-Q8_0.gguf",
    "model-UD-Q5_K_XL.gguf",
]


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("Qwen3-0.6B-Q8_0.gguf", "Q8_0"),
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("tinyllama-1.1b-chat-v1.0.Q4_K_M.gguf", "Q4_K_M"),
        ("Q4_K_M/Model-00001-of-00003.gguf", "Q4_K_M"),
        ("gpt-oss-20b-MXFP4_MOE.gguf", "MXFP4_MOE"),
        ("Phi-3-mini-4k-instruct-fp16.gguf", "FP16"),
        ("Phi-3-mini-4k-instruct-q4.gguf", "Q4"),
        ("Llama-3.2-1B-Instruct-Q4_0_4_8.gguf", "Q4_0_4_8"),
        ("Llama-3-8B-Q4_K_M-imatrix.gguf", "Q4_K_M"),
        ("model.gguf", ""),
    ],
)
def test_the_quantization_is_parsed_from_the_file_name(path: str, label: str):
    assert quantization(path) == label


@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        *((path, False) for path in MANY[:6]),
        *((path, True) for path in MANY[6:]),
        ("model.imatrix.gguf", False),
        ("Llama-3-8B-Q4_K_M-imatrix.gguf", True),
        ("sub/mmproj-x-Q8_0.gguf", False),
        ("model.GGUF", True),
    ],
)
def test_projectors_imatrices_and_draft_heads_are_not_models(path: str, is_one: bool):
    assert is_model(path) == is_one


DRAFTERS = ["x-DFlash-Q8_0.gguf", "x-DFlash-Q4_K_M.gguf", "x.eagle3-F16.gguf"]
ALIKE = ["1b-Q4_K_M.gguf", "3b-Q4_K_M.gguf", "3b-Q8_0.gguf"]


@pytest.mark.parametrize(
    ("paths", "tag", "path"),
    [
        (MANY, "Q4_K_M", "model-Q4_K_M.gguf"),
        (MANY, "q4_k_m", "model-Q4_K_M.gguf"),
        (MANY, "bf16", "model-BF16-00001-of-00002.gguf"),
        (MANY, "Q5_K_XL", "model-UD-Q5_K_XL.gguf"),
        (MANY, "model-Q8_0.gguf", "model-Q8_0.gguf"),
        (MANY, "model-q8_0", "model-Q8_0.gguf"),
        (ALIKE, "3b-q4_k_m.gguf", "3b-Q4_K_M.gguf"),
        # Without a tag: 4 bits, then 8, then the only one.
        (MANY, "", "model-Q4_K_M.gguf"),
        (["m-Q2_K.gguf", "m-Q4_0.gguf", "m-Q8_0.gguf"], "", "m-Q4_0.gguf"),
        (["m-Q4_0.gguf", "m-Q4_K_S.gguf"], "", "m-Q4_K_S.gguf"),
        (["m-UD-Q4_K_XL.gguf", "m-Q8_0.gguf"], "", "m-UD-Q4_K_XL.gguf"),
        (["m-BF16.gguf", "m-Q8_0.gguf"], "", "m-Q8_0.gguf"),
        (["m-F16.gguf"], "", "m-F16.gguf"),
        (["model.gguf", "mmproj-F16.gguf"], "", "model.gguf"),
        # A drafter, if there are only drafters.
        (DRAFTERS, "", DRAFTERS[1]),
        (DRAFTERS, "F16", DRAFTERS[2]),
        ([*DRAFTERS, "x-Q8_0.gguf"], "Q8_0", "x-Q8_0.gguf"),
    ],
)
def test_a_tag_in_any_case_or_no_tag_selects_a_file(paths: list[str], tag: str, path: str):
    assert choose(paths, tag, REPOSITORY) == path


@pytest.mark.parametrize(
    ("name", "path", "exact"),
    [
        ("owner/m-GGUF:Compact", "m-Compact.gguf", True),
        ("owner/m-GGUF:i-compact", "m-I-Compact.gguf", True),
        ("owner/m-GGUF:Compact", "m-I-Compact.gguf", False),
        ("owner/m-GGUF:Instruct", "m-Instruct-Q8_0.gguf", False),
        ("owner/m-GGUF:Q4_K_XL", "m-UD-Q4_K_XL.gguf", True),
        ("owner/other:q8_0", "sub/m-Q8_0-00001-of-00002.gguf", True),
        ("owner/other:m-q8_0.gguf", "m-Q8_0.gguf", True),
        ("owner/other", "m-Q8_0.gguf", True),
    ],
)
def test_a_tag_is_exact_if_it_is_all_that_the_file_name_adds(name: str, path: str, exact: bool):
    meant = parse_hub_name(name)
    assert meant is not None
    assert choose([path], meant.tag, REPOSITORY) == path
    assert is_exact(meant, path) == exact


TAGS = ("BF16", "IQ4_XS", "Q4_0", "Q4_K_M", "Q8_0", "UD-Q5_K_XL")


@pytest.mark.parametrize(
    ("paths", "tag", "names"),
    [
        (MANY, "Q3_K_M", ("owner/name has no Q3_K_M", *TAGS)),
        (MANY[:6], "", ("GGUF",)),
        (["m-Q2_K.gguf", "m-F16.gguf"], "", ("F16", "Q2_K")),
        (ALIKE, "", ALIKE[:2]),
        (ALIKE, "Q4_K_M", ALIKE[:2]),
    ],
)
def test_with_no_or_several_matching_files_the_available_ones_are_listed(
    paths: list[str], tag: str, names: tuple[str, ...]
):
    with raises(ModelNotFound, *names) as caught:
        choose(paths, tag, REPOSITORY)
    assert "mmproj" not in str(caught.value)


def test_all_shards_are_found_and_a_missing_one_is_named():
    first, second = MANY[6:8]
    assert shards_of(first, MANY, REPOSITORY) == [first, second]
    assert shards_of(MANY[9], MANY, REPOSITORY) == [MANY[9]]
    with raises(ModelError, second):
        shards_of(first, [first], REPOSITORY)


def test_a_shard_name_has_its_number_and_the_total():
    shard = shard_of("a/m-Q8_0-00002-of-00003.gguf")
    assert shard is not None
    assert (shard.stem, shard.number, shard.total) == ("a/m-Q8_0", 2, 3)
    assert shard.paths()[2] == "a/m-Q8_0-00003-of-00003.gguf"
    for whole in ("m.gguf", "m-1-of-2.gguf", "m-00004-of-00003.gguf", "m-00000-of-00002.gguf"):
        assert shard_of(whole) is None


LABELS = ("Q2_K", "Q4_0", "q4_k_m", "Q4_K_S", "Q8_0", "BF16", "UD-Q4_K_XL", "IQ3_M", "MXFP4", "")
NAMES = st.builds("{}m-{}.gguf".format, st.sampled_from(["", "a/"]), st.sampled_from(LABELS))


@given(st.sets(NAMES, min_size=1))
def test_every_models_tag_selects_it(paths: set[str]):
    for path in models_of(paths):
        tag = tag_of(path, paths)
        try:
            assert choose(paths, tag, REPOSITORY) == path
        except ModelNotFound:  # two folders have a file of this name
            assert sum(result.rpartition("/")[2] == tag for result in paths) > 1
