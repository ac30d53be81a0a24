"""Names of models on the Hugging Face Hub, and short names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidRequest, ModelNotFound
from paceline.models.names import REGISTRY, hub_name_of, is_short, known_models, short_name
from paceline.models.names.hub_names import HubName, is_hub_name, is_model, parse_hub_name
from support.errors import raises

PART = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True)
REPOSITORY = st.builds("{}/{}".format, PART, PART).filter(
    lambda name: (
        not name.lower().endswith(".gguf")
        and name.partition("/")[0].lower() not in ("huggingface.co", "hf.co", "www.huggingface.co")
        and name.partition("/")[0] not in ("datasets", "spaces", "kernels", "buckets")
        and name.partition("/")[0] not in ("collections", "papers")
    )
)
FILE = st.lists(PART, max_size=3).map(lambda parts: "/".join([*parts, "model-Q4_K_M.gguf"]))
TAG = PART.filter(lambda tag: tag.lower() != "latest")


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("owner/name", HubName("owner/name")),
        ("owner/name:Q4_K_M", HubName("owner/name", tag="Q4_K_M")),
        ("owner/name:latest", HubName("owner/name")),
        ("owner/name/a.gguf", HubName("owner/name", file="a.gguf")),
        ("hf.co/owner/name:Q8_0", HubName("owner/name", tag="Q8_0")),
        ("HF.co/owner/name/a.gguf", HubName("owner/name", file="a.gguf")),
        ("https://hf.co/owner/name:Q8_0", HubName("owner/name", tag="Q8_0")),
        (
            "https://huggingface.co/owner/name/resolve/main/a.gguf?download=true",
            HubName("owner/name", file="a.gguf", revision="main"),
        ),
        (
            "https://huggingface.co/owner/name/blob/v1/sub%20folder/a.gguf",
            HubName("owner/name", file="sub folder/a.gguf", revision="v1"),
        ),
        (
            "huggingface.co/owner/name/blob/refs/pr/7/a.gguf",
            HubName("owner/name", file="a.gguf", revision="refs/pr/7"),
        ),
        (
            "https://huggingface.co/owner/name/resolve/refs%2Fpr%2F7/a.gguf",
            HubName("owner/name", file="a.gguf", revision="refs/pr/7"),
        ),
        ("https://huggingface.co/owner/name/tree/v1", HubName("owner/name", revision="v1")),
        ("https://huggingface.co/owner/name/", HubName("owner/name")),
    ],
)
def test_a_hub_name_has_a_repository_and_optionally_tag_file_and_revision(
    name: str, meaning: HubName
):
    assert parse_hub_name(name) == meaning


@pytest.mark.parametrize(
    "name",
    [
        *("model", "a/b/", "a/b/c", "a//b", "./a", "../a", "a/..", "/a/b", "a/b:", "a/b:c/d.gguf"),
        *("folder/model.gguf", "a/b/../c.gguf", "a/b/./c.gguf", "a/b//c.gguf", "a/b/c\\d.gguf"),
        *("a/b c", "a/b:c d", "a/b/\x00.gguf", "", "/", ":", "a:b"),
    ],
)
def test_other_names_are_not_hub_names(name: str):
    assert parse_hub_name(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "https://example.com/owner/name",
        "https://huggingface.co/datasets/owner/name",
        "https://huggingface.co/owner/name/resolve/main/model.safetensors",
        "https://huggingface.co/owner/name/tree/main/folder",
        "https://huggingface.co/owner/name/resolve/../a.gguf",
        "https://[::1",
        "hf.co/owner",
    ],
)
def test_an_address_that_is_not_a_model_is_rejected_with_the_expected_form(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    with raises(ModelNotFound, name, "expected"):
        parse_hub_name(name)
    monkeypatch.setenv("HF_ENDPOINT", "https://example.com")  # the user's own hub
    address = "https://example.com/owner/name/resolve/main/a.gguf"
    assert parse_hub_name(address) == HubName("owner/name", file="a.gguf", revision="main")


def test_a_revision_must_be_valid_and_given_once():
    name = HubName("owner/name")
    assert name.at_revision(None) == name
    assert (
        name.at_revision("v1").revision == name.at_revision("v1").at_revision("v1").revision == "v1"
    )
    with raises(InvalidRequest, "v1", "v2"):
        name.at_revision("v1").at_revision("v2")
    for wrong in ("", "..", "a/../b", "-x", "a b", "/a"):
        with raises(InvalidRequest, "branch"):
            name.at_revision(wrong)


@given(repository=REPOSITORY, tag=TAG, file=FILE)
def test_a_hub_name_round_trips_through_its_text(repository: str, tag: str, file: str):
    for name in (HubName(repository), HubName(repository, tag=tag), HubName(repository, file=file)):
        assert parse_hub_name(str(name)) == name
        assert parse_hub_name(f"hf.co/{name}") == name
        assert parse_hub_name(f"https://huggingface.co/{name}") == name


@given(st.text(max_size=80))
def test_any_text_is_parsed_or_rejected_and_never_leaves_the_repository(text: str):
    try:
        name = parse_hub_name(text)
    except ModelNotFound:
        return
    if name is None:
        return
    assert is_hub_name(name.repository)
    assert not (name.tag and name.file)
    assert not name.file or not {"", ".", ".."} & set(name.file.split("/"))


def test_short_names_list_about_a_dozen_models_with_metadata():
    models = known_models()
    assert len(models) >= 12
    assert not models.keys() & REGISTRY.keys()
    for name, model in models.items():
        assert "/" not in name
        assert ":" not in name
        assert is_hub_name(model.repository)
        assert is_model(model.file)
        assert parse_hub_name(f"{model.repository}/{model.file}") is not None
        assert model.license
        assert model.bytes > 10**8
        assert model.revision is None or len(model.revision) == 40


def test_a_short_name_means_one_file_at_one_commit():
    name, model = next(iter(known_models().items()))
    assert short_name(name) == HubName(model.repository, file=model.file, revision=model.revision)
    assert short_name(f"{name}:Q8_0") == HubName(model.repository, tag="Q8_0")
    assert is_short(name)
    assert hub_name_of(name) == short_name(name)
    for other in ("", ":", "qwen3", "qwen3-0.6b:", "qwen3-0.6b:a:b", "Q4_K_M"):
        assert short_name(other) in (None, known_models()["qwen3-0.6b"].hub_name)
