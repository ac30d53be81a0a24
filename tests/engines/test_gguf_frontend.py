"""What paceline assumes of the pinned OpenVINO. A failure here says what a new release changed."""

from pathlib import Path
from typing import Any

import pytest

from paceline.engines.openvino.gguf_graph import gguf_model
from paceline.engines.openvino.graph import paged_model
from paceline.models import ModelFiles
from paceline.storage.gguf import read_gguf_graph
from support.tiny_checkpoints import write_gguf_of


def attentions(model: Any) -> list[Any]:
    results = [
        node
        for node in model.get_ordered_ops()
        if node.get_type_name() == "PagedAttentionExtension"
    ]
    assert results
    return results


def forms(node: Any) -> list[tuple[str, int]]:
    """Type and rank of each input."""
    inputs = [node.input_value(i) for i in range(node.get_input_size())]
    return [
        (result.get_element_type().get_type_name(), result.get_partial_shape().rank.get_length())
        for result in inputs
    ]


def test_pagedattention_has_the_inputs_that_the_transformation_gives_it(
    tiny_gguf: Path, tiny_int8: ModelFiles
):
    result, transformed = (
        attentions(model)[0] for model in (gguf_model(tiny_gguf), paged(tiny_int8))
    )
    assert forms(result) == forms(transformed)
    names = ("k_head_size", "num_k_heads", "v_head_size", "num_v_heads")
    mine, theirs = (
        [node.get_rt_info()[name].value for name in names] for node in (result, transformed)
    )
    assert mine == theirs


def paged(files: ModelFiles) -> Any:
    return paged_model(files.path)


def test_the_frontend_has_the_inputs_that_are_replaced(tiny_gguf: Path):
    names = {node.get_friendly_name() for node in read_gguf_graph(tiny_gguf).get_parameters()}
    caches = {f"cache_{kind}_l{layer}" for kind in "kv" for layer in (0, 1)}
    result = {"inp_tokens", "inp_pos", "inp_out_ids", "inp_kv_idx", "self_kq_mask"}
    assert names == {*result, *caches, "token_len_per_seq"}


@pytest.mark.parametrize("form", ["llama3", "phi3-longrope"])
def test_the_frontend_still_leaves_out_factors_of_positions(form: str, tmp_path: Path):
    """When it reads them, `gguf_rope.py` has less to mend."""
    model = read_gguf_graph(write_gguf_of(form, tmp_path / "m.gguf"))
    assert not any("rope_f" in node.get_friendly_name() for node in model.get_ordered_ops())
