"""GGUF files of ollama's own converters, made of llama.cpp's: refused with what works instead."""

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import ModelError
from paceline.models import resolve
from paceline.models.gguf.support import check_layout
from paceline.storage.gguf_file import GgufFile, read_gguf
from support.errors import raises
from support.families import write_gguf_of

EPSILON = "gemma3.attention.layer_norm_rms_epsilon"


@pytest.fixture
def gemma3(tmp_path: Path) -> GgufFile:
    return read_gguf(write_gguf_of("gemma3_text", tmp_path / "m.gguf"))


def refused(file: GgufFile, *names: str) -> None:
    with raises(ModelError, "m.gguf", *names):
        check_layout(Path("m.gguf"), file)


def test_gemma_3_with_ollamas_own_metadata_is_refused(gemma3: GgufFile):
    check_layout(Path("m.gguf"), gemma3)
    for name in ("mm.tokens_per_image", "rope.global.freq_base", "rope.local.freq_base"):
        fields = {**gemma3.fields, f"gemma3.{name}": 1e4}
        refused(
            replace(gemma3, fields=fields),
            f"layout of ollama's own converter, not in llama.cpp's (it has gemma3.{name})",
            "use a gemma3 file of the hub",
        )
    fields = {name: value for name, value in gemma3.fields.items() if name != EPSILON}
    refused(replace(gemma3, fields=fields), f"(it has no {EPSILON})")
    fields = {**gemma3.fields, "general.architecture": "gemma4", "tokenizer.ggml.model": "llama"}
    refused(replace(gemma3, fields=fields), "the tokenizer llama")


def test_a_file_with_an_image_encoder_inside_is_refused(gemma3: GgufFile):
    first, *rest = gemma3.tensors
    encoder = first._replace(name="v.blk.0.attn_q.weight")
    refused(replace(gemma3, tensors=[*rest, encoder]), "it has the tensor v.blk.0.attn_q.weight")


def test_gpt_oss_under_ollamas_name_is_refused_with_the_name_that_works(
    tmp_path: Path, tiny_gguf: Path
):
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    path = tmp_path / "gptoss.gguf"
    path.write_bytes(tiny_gguf.read_bytes().replace(text("llama"), text("gptoss"), 1))
    with raises(ModelError, path, "use a gpt-oss file of the hub"):
        resolve(str(path), tmp_path / "cache")
