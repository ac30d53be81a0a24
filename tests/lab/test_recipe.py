"""The recipe of the default model's drafters, on the CPU: kernels interpreted, or no kernels."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.drafters.table import Table
from paceline.errors import InvalidRequest, ModelError
from paceline.models import ModelFiles
from support.tiny import SIZES, reference_logits, write_tiny
from support.waiting import PATIENCE

torch = pytest.importorskip("torch")
if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

pytestmark = pytest.mark.reference

RECIPE = Path(__file__).parents[2] / "recipes" / "smollm2-135m"
NAMES = ("conversations", "decode", "make", "openings", "selection")
END = 9
TEMPLATE, USER, ANSWER, LOOP = range(4)


@pytest.fixture(scope="module")
def recipe() -> Iterator[Any]:
    """The recipe's modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(RECIPE)
        yield SimpleNamespace(**{name: __import__(name) for name in NAMES})
    for name in NAMES:
        del sys.modules[name]


DECODE = """
import sys
from pathlib import Path
import numpy as np
import torch
from decode import Decoder, read_weights

path, texts, out = map(Path, sys.argv[1:])
texts = np.load(texts)
decoder = Decoder(read_weights(path, "cpu"), batch=len(texts), slots=texts.shape[1])
for place, tokens in enumerate(torch.from_numpy(texts).T):
    logits = decoder.step(tokens, torch.full((len(texts),), place, dtype=torch.int32))
np.save(out, logits.float())
"""
"""In a process of its own: Triton reads the variable for it when it is imported."""


def test_a_decoded_batch_has_the_logits_of_a_plain_forward_pass(
    tmp_path: Path,
):
    # Three query heads to a head of keys, as in the default model, and more than one block of keys.
    sizes = {**SIZES, "d": 96, "heads": 6, "layers": 1}
    path = write_tiny(tmp_path / "tiny.gguf", sizes=sizes)
    texts = np.random.default_rng(0).integers(0, 320, (2, 70))
    np.save(tmp_path / "texts.npy", texts)
    search = os.pathsep.join([str(RECIPE), *sys.path])
    subprocess.run(
        [sys.executable, "-c", DECODE, path, tmp_path / "texts.npy", tmp_path / "logits.npy"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": search},
        check=True,
        timeout=PATIENCE,
    )
    decoded = np.load(tmp_path / "logits.npy")
    for number, text in enumerate(texts.tolist()):
        np.testing.assert_allclose(decoded[number], reference_logits(path, text)[-1], atol=0.02)


def test_a_model_that_the_kernels_do_not_compute_is_rejected(recipe: Any, tmp_path: Path):
    for family in ("qwen2", "qwen3"):
        with pytest.raises(ModelError, match=family):
            recipe.decode.read_weights(write_tiny(tmp_path / f"{family}.gguf", family), "cpu")


class Scripted:
    """A decoder whose model says what is written: token after place of each sequence."""

    says: list[list[int]]

    def __init__(self, weights: Any, batch: int, slots: int) -> None: ...

    def step(self, tokens: Any, positions: Any) -> Any:
        rows = zip(self.says, positions.tolist(), strict=True)
        chosen = torch.tensor([says[place + 1] for says, place in rows])
        return 30.0 * torch.nn.functional.one_hot(chosen, 32)


@pytest.fixture
def conversations(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes conversations of a model that says given texts; turns are those left, all greedy."""
    monkeypatch.setattr(recipe.conversations, "Decoder", Scripted)
    weights = SimpleNamespace(embedding=torch.zeros(32, 2))
    openings = np.array([[1, 2, -1], [1, 2, 3]], np.int32)
    script = recipe.openings.Script(openings, END, to_answer=[1, 4], to_user=[1, 2])

    def make(*says: list[int], turns: int = 0) -> Any:
        Scripted.says = [text + [0] * 700 for text in says]
        made = recipe.conversations.Conversations(
            weights, script, batch=len(says), slots=600, seed=0
        )
        made._turns.fill_(turns)
        made._temperature.fill_(0)
        return made

    return make


def harvested(recipe: Any, conversations: Any) -> Any:
    corpus = recipe.conversations.Corpus(2000, torch.device("cpu"))
    assert conversations.harvest(corpus)
    return corpus


def test_tokens_are_marked_as_template_user_and_answer(recipe: Any, conversations: Any):
    #      opening  user              answer          user            answer, between the template
    one = [1, 2, *(11, 12, 9), 1, 4, *(21, 9), 1, 2, *(13, 9), 1, 4, *(22, 23, 9)]
    kinds = [0] * 2 + [1] * 3 + [0] * 2 + [2] * 2 + [0] * 2 + [1] * 2 + [0] * 2 + [2] * 3
    other = [1, 2, 3] + [14, 9] + [1, 4] + [24] * 9
    talk = conversations(one, other, turns=1)
    talk.run(len(one) - 1)
    assert talk.is_over.tolist() == [True, False]
    corpus = harvested(recipe, talk)
    assert corpus.tokens.tolist() == one
    assert corpus.kinds.tolist() == kinds
    assert corpus.lengths == [len(one)]
    assert not talk.is_over.any()
    assert talk.tokens[0, :4].tolist() == [1, 2, -1, -1]


def test_an_answer_in_a_loop_ends_and_is_marked(recipe: Any, conversations: Any):
    period = [20, 21, 22, 23, 24]
    begin = [1, 2, 11, 9, 1, 4]
    counting = [*range(10, 32)] * 2
    talk = conversations(begin + period * 40, [1, 2, 3, 11, 9, 1, 4] + [12, *counting, 30] * 3)
    talk.run(len(begin) + 85)
    talk.end_loops()
    assert talk.is_over.tolist() == [True, True]
    corpus = harvested(recipe, talk)
    kinds = corpus.kinds[: corpus.lengths[0]].tolist()
    assert kinds == [TEMPLATE] * 2 + [USER] * 2 + [TEMPLATE] * 2 + [LOOP] * 86


def test_an_answer_that_does_not_repeat_itself_is_no_loop(recipe: Any, conversations: Any):
    rng = np.random.default_rng(0)
    talk = conversations([1, 2, 11, 9, 1, 4, *rng.integers(10, 32, 300).tolist()])
    talk.run(200)
    talk.end_loops()
    assert not talk.is_over.any()


def test_a_message_without_an_end_ends_the_conversation(recipe: Any, conversations: Any):
    longest = recipe.conversations.LONGEST_ANSWER
    talk = conversations([1, 2, 11, 9, 1, 4] + [12] * 600, [1, 2, 3] + [13] * 600)
    talk.run(450)
    kinds = harvested(recipe, talk).kinds.numpy()
    assert np.count_nonzero(kinds == ANSWER) == longest
    assert np.count_nonzero(kinds == USER) == 2 + recipe.conversations.LONGEST_PROMPT


def corpus_of(recipe: Any, texts: list[tuple[list[int], list[int]]]) -> Any:
    """Conversations of a user's message and an answer each."""
    corpus = recipe.conversations.Corpus(100_000, torch.device("cpu"))
    for message, answer in texts:
        tokens = torch.tensor([1, 2, *message, 1, 4, *answer], dtype=torch.int32)
        kinds = [TEMPLATE] * 2 + [USER] * len(message) + [TEMPLATE] * 2 + [ANSWER] * len(answer)
        corpus.add(tokens, torch.tensor(kinds, dtype=torch.uint8), [len(tokens)])
    return corpus


def test_repeated_conversations_and_those_with_a_benchmarks_question_are_left_out(recipe: Any):
    question = list(range(40, 60))
    texts = [([number, 9], [number] * 8) for number in range(100, 160)]
    texts[3] = texts[2]
    texts[5] = ([7, *question[4:12], 9], [5] * 8)  # eight tokens of it
    texts[6] = ([7, *question[4:11], 9], [6] * 8)  # seven
    texts[8] = ([8, 9], [8, *question])  # its words in an answer
    texts[9] = ([10, 9], [1] * 7)  # too short
    training, held_out = recipe.selection.select(corpus_of(recipe, texts), [question])
    assert held_out.conversations.tolist() == [0, 50]
    left_out = {3, 5, 9}
    assert training.conversations.tolist() == sorted({*range(60)} - {0, 50} - left_out)
    assert training.lengths[[0, 5]].tolist() == [8, 21]


def test_openings_are_the_same_for_a_seed_and_need_their_dictionaries(
    recipe: Any, tiny_files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(recipe.openings, "KNOWN", 20)  # the tiny model knows bytes
    for name in ("american-english", "ngerman", "french"):
        (tmp_path / name).write_text("then\nin\nAsser\n", encoding="utf-8")
    scripts = [recipe.openings.write_script(tiny_files, tmp_path, 3) for _ in range(2)]
    assert np.array_equal(scripts[0].openings, scripts[1].openings)
    assert len(np.unique(scripts[0].openings, axis=0)) > 100
    encode = tiny_files.tokenizer().encode
    template = "<|im_end|>\n<|im_start|>assistant\n"
    assert [scripts[0].end, *scripts[0].to_answer] == encode(template, special=True)
    with pytest.raises(InvalidRequest, match="wngerman"):
        (tmp_path / "ngerman").unlink()
        recipe.openings.write_script(tiny_files, tmp_path, 3)


def test_the_table_predicts_what_answers_repeat(recipe: Any, tmp_path: Path):
    answer = list(range(50, 80))
    corpus = corpus_of(recipe, [([40, 9], answer), ([41, 9], answer)])
    spans = recipe.selection.answers_of(corpus.kinds.numpy(), np.array(corpus.lengths))
    assert recipe.make.make_table(corpus, spans, spans, 320, tmp_path / "table") == 1
    successor = Table.open(tmp_path / "table", 320).after(answer[5:10])
    assert successor is not None
    assert successor.token == answer[10]


def test_without_a_gpu_it_says_so(
    recipe: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["make.py", "model.gguf", "out"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert recipe.make.main() == 2
    error = capsys.readouterr().err
    assert "CUDA" in error
    assert error.count("\n") == 1
