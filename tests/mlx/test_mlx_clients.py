"""A model in MLX under the HTTP server's load: tokens are those of plain decoding.

Its clients share calls. The load is that of `test_exact_under_load.py`: eight clients.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from paceline.runtime.model import Model
from paceline.server.settings import Settings
from paceline_mlx.model import LoadedModel
from support import mlx
from support.load import (
    CLIENTS,
    SPECULATIONS,
    Load,
    is_the_same,
    plain_answers,
    questions,
    requests,
)
from support.server import running

pytestmark = [pytest.mark.mlx, pytest.mark.slow]

FEW = {"logit_bias": {4 + ord(letter) - ord(" "): 40.0 for letter in "the, rain"}}
"""Random models repeat themselves, and some drafts stand, if they have few tokens to pick from."""

LOAD = Load(
    32,
    12,
    tuple(item for item in SPECULATIONS if "table" not in item.get("drafter", "")),
    frozenset({"ngram", "prediction"}),
    2,
    FEW,
    0.5,
)


def write_byte_tokenizer(folder: Path) -> None:
    """A token for each printable ASCII character, in the form that grammars know."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = ["<unk>", "<s>", "</s>", "Ċ", "Ġ", *map(chr, range(33, 127))]
    vocabulary = {character: number for number, character in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(characters[:3])
    tokenizer.save(str(folder / "tokenizer.json"))


def test_answers_are_those_of_plain_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # It has attention and a recurrence.
    folder = mlx.checkpoint(tmp_path / "checkpoint", "qwen3_5", max_position_embeddings=1024)
    write_byte_tokenizer(folder)
    model: Model = mlx.model(folder, tmp_path / "cache", cache_tokens=8 * 1024)
    answers = plain_answers(model, LOAD)
    together: list[int] = []
    original = LoadedModel.call_together

    def counting(self: LoadedModel, parts: Any, **options: Any) -> Any:
        together.append(len(parts))
        return original(self, parts, **options)

    monkeypatch.setattr(LoadedModel, "call_together", counting)
    asked = questions(LOAD)
    items = list(requests(LOAD, answers))
    with running(model.fresh(), Settings(drafter="auto")) as server:
        with ThreadPoolExecutor(CLIENTS) as clients:
            reports = list(clients.map(lambda item: item.ask(server), items))
        server.rest()
        assert server.scheduler.load.failed == 0
    for told, item in zip(reports, items, strict=True):
        is_the_same(told, answers[asked.index(item.question)], model.files.stop_token_ids, item)
    assert sum(told.accepted for told in reports) > len(reports)
    assert max(together) >= 4
