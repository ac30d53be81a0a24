"""A head for a model: trained on its answers, and measured beside what `auto` drafts with now.

The head reads logits, so that no recorded text can be replayed with it: the model answers prompts
of held-out answers, with the head and without, in turns.
"""

import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, takewhile
from pathlib import Path
from statistics import geometric_mean

from paceline.drafters import DrafterSpec
from paceline.errors import InvalidRequest, MissingExtra
from paceline.models import ModelFiles, Progress
from paceline.options import GREEDY, Options
from paceline.runtime.drafting import drafter_resources
from paceline.runtime.load import load
from paceline.runtime.model import Model
from paceline.runtime.result import Result
from paceline.storage.files import digest_of
from paceline_lab.bench.ab_test import interleaved
from paceline_lab.learn.budget import Budget
from paceline_lab.learn.data import temperatures_of
from paceline_lab.learn.evaluate import LEAST_ANSWERS, Comparison, Sets
from paceline_lab.learn.folder import Example
from paceline_lab.train.answers import Answer
from paceline_lab.train.commands import check_training, files_to_train_on, train_head

TRAINING_ENDS = 0.92
"""Share of the time; measuring takes the rest."""

_SCHEDULE = {
    **{"epochs": 4, "texts": 4, "depth": 4, "shallow": 0.5, "dropout": 0.1, "rate": 1e-3},
    **{"seed": 0, "evaluate_every": 250},  # a run that is killed goes on from an evaluation
}

_VOCAB = 8192
STATES_BYTES = 2_000_000_000
"""Of hidden states on disk while a head is trained."""

_RECORDING_SHARE = 0.4
"""Of the time that is left for a head, for its answers' hidden states."""

_HIDDEN_STATES = "features"
_STATE = "state.pt"

_MEASURED = LEAST_ANSWERS, 20
"""Answers of a set that are measured in any case, and at most."""

_MAX_TOKENS = 128

_ENGINES = ("llamacpp", "openvino")
"""A head reads logits, which all return; openvino computes what it learns from."""

_PLAIN, _BEFORE, _AFTER = "plain", "before", "after"


def why_none(files: ModelFiles) -> str:
    """Why no head can be trained for a model as it is used here; empty if one can."""
    if files.engine not in _ENGINES:
        return (
            f"no head is trained: {files.name} runs in {files.engine} here, and heads are trained "
            f"for {' and '.join(_ENGINES)} (--engine)"
        )
    try:
        check_training(rate=_SCHEDULE["rate"], device="cpu")
    except MissingExtra as error:
        return f"no head is trained: {error}"
    return ""


def head_folder(folder: Path, training: Sequence[Example]) -> Path:
    """Where the head of these examples is: others get another one."""
    return folder / f"mtp-{digest_of([example.answer.tokens for example in training])}"


def is_unfinished(head: Path) -> bool:
    """Whether training of a head began and has not ended."""
    return (head / _HIDDEN_STATES).is_dir()


def make_head(
    model: str,
    head: Path,
    answered: Sequence[Example],
    *,
    budget: Budget,
    progress: Progress,
) -> bool:
    """Train a head in the folder `head`, from where an earlier run was stopped.

    Args:
        model: its target, as the user named it.
        head: see `head_folder`.
        answered: what to learn from; less, if there is more than time and disk allow.
        budget: training ends in time.
        progress: shows it.

    Returns:
        False if no time was left to begin; a later call does, with the same hidden states.

    Raises:
        InvalidRequest: too few answers, or a model that is not dense.
        ModelError: the model cannot be read.
    """
    for other in head.parent.glob("mtp-*"):
        if is_unfinished(other) and other != head:  # of fewer answers than there are now
            shutil.rmtree(other, ignore_errors=True)
    files, graph = files_to_train_on(model, progress)
    recording = budget.over(_RECORDING_SHARE, TRAINING_ENDS)
    begun = (head / _STATE).is_file()
    curve = train_head(
        files,
        graph,
        _some(answered, STATES_BYTES / (2 * graph.hidden_size)),
        head,
        vocab=_VOCAB,
        logits=True,
        schedule=_SCHEDULE,
        device="cpu",
        progress=progress,
        recorded=lambda: begun or recording() >= 1,
        over=budget.over(1.0, TRAINING_ENDS),
    )
    if not curve:
        return False
    (head / _STATE).unlink(missing_ok=True)
    shutil.rmtree(head / _HIDDEN_STATES)
    return True


def compare_head(
    model: str, head: Path, sets: Sets, *, engine: str, budget: Budget, progress: Progress
) -> dict[str, Comparison]:
    """Measure `auto` with the head in place of any other, and as it is now, set by set.

    Raises InvalidRequest if an answer changes, which no drafter may do.
    """
    spec = f"mtp:{head}"
    with load(model, engine=engine, drafters=("auto", spec), progress=progress) as opened:
        kinds = {*drafter_resources(opened.files, progress).shipped}
        before = str(DrafterSpec.parse("auto").resolve(kinds))
        rest = str(DrafterSpec.parse("auto").resolve(kinds - {"mtp"}))
        drafters = {_PLAIN: "none", _BEFORE: before, _AFTER: f"{rest}+{spec}"}
        opened.measure_profile()
        opened.fix_costs()
        return {
            name: _measured(opened, examples, drafters, budget, progress)
            for name, examples in sets.named.items()
            if examples
        }


def _measured(
    model: Model,
    examples: Sequence[Example],
    drafters: Mapping[str, str],
    budget: Budget,
    progress: Progress,
) -> Comparison:
    least, most = _MEASURED
    answers: list[dict[str, Result]] = []
    with progress.task("measuring the head", min(len(examples), most), unit="answers") as update:
        for number, example in enumerate(examples[:most]):
            if number >= least and not budget.left:
                break
            results = _answers(model, example, drafters, number)
            plain = replace(example.answer, answer=results[_PLAIN].token_ids, finish="")
            if not replace(example, answer=plain).loops:  # everything foresees these
                answers.append(results)
            update(number + 1)
    return Comparison(
        len(answers),
        *(_tokens_per_step(answers, name) for name in (_AFTER, _BEFORE)),
        *(_speed(answers, name) for name in (_AFTER, _BEFORE)),
    )


def _answers(
    model: Model, example: Example, drafters: Mapping[str, str], number: int
) -> dict[str, Result]:
    """The answer to an example's prompt by each drafter, at the example's temperature and seed."""
    at = example.answer.number
    temperatures = temperatures_of(model.files)
    sampled: Options = {"temperature": temperatures[at % len(temperatures)], "seed": at}

    def answer(drafter: str) -> Result:
        options: Options = {**GREEDY, **sampled, "drafter": drafter, "max_tokens": _MAX_TOKENS}
        return model.fresh().generate(example.answer.prompt, **options)

    calls = {name: lambda drafter=drafter: answer(drafter) for name, drafter in drafters.items()}
    results = {name: one for name, (one,) in interleaved(calls, 1, number).items()}
    if any(result.token_ids != results[_PLAIN].token_ids for result in results.values()):
        raise InvalidRequest(
            f"{model.files.name} gave another answer with drafts than without; check it with "
            "`paceline verify`"
        )
    return results


def _tokens_per_step(answers: Sequence[Mapping[str, Result]], name: str) -> float:
    stats = [results[name].stats for results in answers]
    return sum(one.decoded for one in stats) / max(sum(one.steps for one in stats), 1)


def _speed(answers: Sequence[Mapping[str, Result]], name: str) -> float:
    """Geometric mean of speeds over plain decoding."""
    pairs = [(results[name].stats, results[_PLAIN].stats) for results in answers]
    ratios = [
        stats.decode_tokens_per_second / plain.decode_tokens_per_second
        for stats, plain in pairs
        if stats.decode_tokens_per_second and plain.decode_tokens_per_second
    ]
    return geometric_mean(ratios) if ratios else 1.0


def _some(examples: Sequence[Example], tokens: float) -> list[Answer]:
    """Answers with at most `tokens` tokens, prompts included, always in the same random order.

    The examples are sorted by topic, and how many there is time for is not known yet.
    """
    shuffled = random.Random(0).sample(examples, len(examples))
    ends = accumulate(len(example.answer.tokens) for example in shuffled)
    fitting = takewhile(lambda pair: pair[1] <= tokens, zip(shuffled, ends, strict=True))
    return [example.answer for example, _ in fitting]
