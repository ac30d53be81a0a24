import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import paceline
from paceline.drafters import Table
from paceline.drafters.table import (
    KEYS,
    KIND,
    MAX_ORDER,
    PROBABILITIES,
    PROBABILITY_UNITS,
    TOKENS,
    keys_of,
)
from paceline.drafters.table_counts import Entries, accuracy, count_table
from paceline.storage.manifest import MANIFEST
from paceline_lab.learn.table import write_table
from support.drafters import Text

VOCAB = 5
SHORTER, SAME, MISSED = 2.5, 0.15, 0.02
Context = tuple[int, ...]


def texts(min_answer: int = 1, max_answer: int = 14) -> st.SearchStrategy[list[Text]]:
    """Some answers; the first is long enough that a context of every length is in it."""
    tokens = st.integers(0, VOCAB - 1)
    prompt = st.lists(tokens, max_size=7)
    answer = st.lists(tokens, min_size=min_answer, max_size=max_answer)
    first = st.tuples(prompt, st.lists(tokens, min_size=MAX_ORDER + 1, max_size=40))
    rest = st.lists(st.tuples(prompt, answer), max_size=5)
    return st.builds(lambda one, more: [Text(*each) for each in [one, *more]], first, rest)


def counted(answers: Sequence[Text]) -> dict[Context, Counter[int]]:
    """What follows what in the answers, one place after the other."""
    follows: dict[Context, Counter[int]] = {}
    for each in answers:
        for place in range(len(each.prompt), len(each.tokens)):
            for length in range(1, min(place, MAX_ORDER) + 1):
                context = tuple(each.tokens[place - length : place])
                follows.setdefault(context, Counter())[each.tokens[place]] += 1
    return follows


def by_key(entries: Entries) -> dict[int, tuple[int, float]]:
    columns = entries.keys.tolist(), entries.tokens.tolist(), entries.probabilities.tolist()
    return {key: (token, chance) for key, token, chance in zip(*columns, strict=True)}


def key_of(context: Context) -> int:
    return keys_of(context)[-1]


def reference(answers: Sequence[Text]) -> dict[Context, tuple[int, float]]:
    """The table as its words say, where the most frequent successor is one alone or the last."""
    kept: dict[Context, tuple[int, float]] = {}
    for context, counts in sorted(counted(answers).items(), key=lambda item: len(item[0])):
        endings = (context[at:] for at in range(1, len(context)))
        said, believed = next((kept[ending] for ending in endings if ending in kept), (-1, 0.0))
        weight, total = SHORTER * len(counts), counts.total()
        top, token = max((count, token) for token, count in counts.items())
        chance = (top + weight * (believed if said == token else MISSED)) / (total + weight)
        stays = (counts[said] + weight * believed) / (total + weight)
        if stays > chance:
            token, chance = said, stays
        if len(context) == 1 or said != token or abs(chance - believed) > SAME:
            kept[context] = (token, chance)
    return kept


# -- counting --------------------------------------------------------------------------------------


@given(answers=texts())
def test_a_table_matches_counts_made_by_hand(answers: list[Text]):
    expected = {key_of(context): entry for context, entry in reference(answers).items()}
    found = by_key(count_table(answers))
    assert {key: token for key, (token, _) in found.items()} == {
        key: token for key, (token, _) in expected.items()
    }
    for key, (_, chance) in found.items():
        assert chance == pytest.approx(expected[key][1])
    entries = count_table(answers)
    assert np.all(entries.keys[1:] > entries.keys[:-1]), "sorted, and no key is there twice"


@pytest.mark.parametrize("length", [0, 1, MAX_ORDER])
def test_responses_may_be_shorter_than_the_longest_context(length: int):
    entries = by_key(count_table([Text([], [1, 2, 3, 4, 1][:length])]))
    assert entries.keys() >= {key_of((token,)) for token in range(1, min(length, 5))}


# -- choosing --------------------------------------------------------------------------------------


@given(answers=texts(), count=st.integers(1, 30))
def test_the_best_entries_have_the_highest_gain_and_are_sorted_by_key(
    answers: list[Text], count: int
):
    entries = count_table(answers)
    best = entries.best(count)
    assert len(best.keys) == min(count, len(entries.keys))
    assert np.all(best.keys[1:] > best.keys[:-1])
    assert sorted(best.gain) == sorted(entries.gain)[-count:]
    everything = by_key(entries)
    assert all(everything[key] == value for key, value in by_key(best).items())


# -- how it does -----------------------------------------------------------------------------------

ONE_FOLDER = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@ONE_FOLDER
@given(answers=texts(), others=texts(), count=st.integers(1, 60))
def test_accuracy_matches_the_written_table(
    answers: list[Text], others: list[Text], count: int, tmp_path: Path
):
    entries = count_table(answers).best(count)
    write_table(entries, tmp_path, target="toy", vocab_size=VOCAB, facts={})
    table = Table.open(tmp_path, VOCAB)
    asked = [
        (each.tokens[place], table.after(each.tokens[:place]))
        for each in others
        for place in range(len(each.prompt), len(each.tokens))
    ]
    right = [found is not None and found.token == token for token, found in asked]
    chances = [0.0 if found is None else found.probability for _, found in asked]
    found = accuracy(entries, others)
    assert found["tokens"] == len(asked)
    assert found["right"] == pytest.approx(np.mean(right))
    assert found["promised"] == pytest.approx(np.mean(chances), abs=0.5 / PROBABILITY_UNITS)


def test_a_tables_probabilities_match_its_accuracy():
    # Where it knows the source, what it promises must come true about as often.
    rng = np.random.default_rng(3)
    usual = rng.integers(0, 50, 50)

    def made() -> Text:
        text = [int(rng.integers(50))]
        while len(text) < 400:
            text.append(int(usual[text[-1]] if rng.random() < 0.7 else rng.integers(50)))
        return Text(text[:1], text[1:])

    learnt, kept_back = [made() for _ in range(40)], [made() for _ in range(5)]
    found = accuracy(count_table(learnt), kept_back)
    assert found["right"] > 0.6, "of 0.7 that can be known"
    assert found["promised"] == pytest.approx(found["right"], abs=0.1)


# -- the folder ------------------------------------------------------------------------------------


@pytest.fixture
def entries() -> Entries:
    return count_table([Text([0], [1, 2, 3, 4] * 5), Text([4], [2, 0] * 3)])


def test_the_tables_folder_records_its_sources(entries: Entries, tmp_path: Path):
    facts: dict[str, Any] = {"answers": 2, "held_out": {"right": 0.5}}
    folder = tmp_path / "new" / "table"
    write_table(entries, folder, target="toy", vocab_size=VOCAB, facts=facts)
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["kind"] == KIND
    assert manifest["made_by"] == f"paceline {paceline.__version__}"
    assert (manifest["target"], manifest["vocab_size"]) == ("toy", VOCAB)
    assert manifest["entries"] == len(entries.keys)
    assert (manifest["answers"], manifest["held_out"]) == (2, {"right": 0.5})
    assert manifest["files"].keys() == {KEYS, TOKENS, PROBABILITIES}
    assert {path.name for path in folder.iterdir()} == {KEYS, TOKENS, PROBABILITIES, MANIFEST}


def test_rewriting_a_table_leaves_the_open_files_alone(entries: Entries, tmp_path: Path):
    write_table(entries, tmp_path, target="toy", vocab_size=VOCAB, facts={})
    before = {name: (tmp_path / name).stat().st_ino for name in (KEYS, TOKENS, PROBABILITIES)}
    open_files = [(tmp_path / name).open("rb") for name in before]  # so that no inode is used anew
    write_table(entries.best(3), tmp_path, target="toy", vocab_size=VOCAB, facts={})
    for file in open_files:
        file.close()
    assert all((tmp_path / name).stat().st_ino != inode for name, inode in before.items())
