"""A model's learned drafters are found by its fingerprint and removed by its name."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

import pytest

from paceline.runtime.drafting import (
    HEADER,
    Drafting,
    all_learned,
    install,
    installed_drafters,
    learned_dir,
    learned_of,
)
from paceline.runtime.model import Model
from paceline.storage.files import write_json
from support.drafters import write_toy_table

PROMPT = "the quick brown fox"


@pytest.fixture
def table(model: Model) -> Iterator[Path]:
    folder = learned_dir() / model.files.fingerprint[:24]
    folder.mkdir(parents=True)
    write_json(folder / HEADER, {"model": model.files.name})
    answer = list(model.generate(PROMPT, max_tokens=40, ignore_eos=True).token_ids)
    (folder / "table-1").mkdir()
    yield write_toy_table(folder / "table-1", [answer], model.engine.vocab_size)
    rmtree(learned_dir(), ignore_errors=True)


def test_auto_uses_an_installed_table_without_changing_tokens(model: Model, table: Path):
    plain = model.generate(PROMPT, max_tokens=40, ignore_eos=True, drafter="none")
    assert Model(model.files, model.engine)._request({}).drafter.has("table") is False
    install(model.files, "table", table)
    answer = Model(model.files, model.engine).generate(PROMPT, max_tokens=40, ignore_eos=True)
    assert answer.token_ids == plain.token_ids
    assert answer.drafter == "suffix+table"
    assert answer.stats.accepted_by["table"] > 0


def test_learned_drafters_that_are_stale_corrupt_or_missing_are_ignored(model: Model, table: Path):
    head = table.parent / "mtp-1"  # without a manifest, as earlier versions made them
    head.mkdir()
    for kind, folder in (("mtp", head), ("table", table)):
        install(model.files, kind, folder)
    assert Drafting(model.files).resources.shipped == {"table": table}
    assert installed_drafters(replace(model.files, fingerprint="f" * 64)) == {}
    (index,) = (learned_dir() / "installed").iterdir()
    for content in ("", "[]", '{"drafters": 3}', '{"drafters": {"a": 1}}'):
        index.write_text(content)
        assert installed_drafters(model.files) == {}, content
    install(model.files, "table", table)
    rmtree(table)
    assert installed_drafters(model.files) == {}


def test_learned_drafters_are_listed_and_removed_by_model(model: Model, table: Path):
    install(model.files, "table", table)
    (learnt,) = all_learned()
    assert learnt.model == model.files.name
    assert learnt.bytes > 0
    assert {*learnt.paths} == {*learned_of(model.files.name.upper())}
    assert learned_of("another") == []
    learnt.remove()
    assert all_learned() == []
    assert not table.exists()
