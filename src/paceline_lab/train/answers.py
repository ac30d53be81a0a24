"""Training data: the target's own answers to prompts, in a folder.

`answers.jsonl` has a line per answer with the token ids of prompt and answer; `manifest.json` has
target, prompts and settings. Answers are appended one by one, so a stopped run can continue.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import paceline
from paceline.decoding.types import FinishReason
from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.options import GREEDY, Options
from paceline.runtime.model import Model
from paceline.runtime.request import check
from paceline.runtime.stream import Stream, as_they_end
from paceline.storage.files import read_json, sha256_of, write_json, writing
from paceline.storage.json_lines import appending, read_entries
from paceline.storage.manifest import MANIFEST, begin_artifact
from paceline.verify.suite import Suite, load_suite, prompt_for

ANSWERS = "answers.jsonl"
KIND = "paceline answers"

_T = TypeVar("_T")

_HELD_OUT = 20

_LOOP = 32
"""Tokens: an answer that repeats this many tokens is in a loop and ends."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What answers depend on; the same for a whole folder."""

    max_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0,)
    """Used in turn, prompt by prompt."""
    seed: int = 0
    longest_prompt: int = 1024
    """In tokens; longer prompts are skipped."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A line of `answers.jsonl`: token ids of a prompt and its answer."""

    number: int
    prompt: list[int]
    answer: list[int]
    finish: str = ""
    """Why it ended: a `FinishReason`, or `loop`."""

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        return [*self.prompt, *self.answer]


def make_answers(
    model: Model,
    prompts: Sequence[Path],
    folder: Path,
    settings: Settings,
    *,
    at_once: int,
    progress: Progress,
    drafter: str = "none",
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Generate answers to the prompts in `prompts` into `folder`, except those already there.

    An answer ends early when it repeats itself. Prompts of a model without a chat template are
    their text.

    Args:
        model: the target, with a cache for `at_once` sequences.
        prompts: JSON Lines files (see `load_suite`); duplicate prompts are skipped.
        folder: created if missing.
        settings: what answers depend on.
        at_once: sequences in a batch.
        progress: reports answers.
        drafter: for engines whose calls have one sequence, where drafts pay in batches too.
        stop: called after each answer; True: leave the others to a later run.

    Returns:
        The manifest; `complete` says whether every prompt has its answer.

    Raises:
        InvalidRequest: the folder has answers of another model, other prompts or other settings.
    """
    for temperature in settings.temperatures:
        check(
            {"max_tokens": settings.max_tokens, "temperature": temperature, "seed": settings.seed}
        )
    suites = [load_suite(path) for path in prompts]
    manifest = _about(model, prompts, suites, settings)
    begin_artifact(folder, KIND)
    _check_same(folder, manifest)
    prompt_ids = _prompt_tokens(model, suites, settings.longest_prompt)
    with writing(folder):
        write_json(folder / MANIFEST, {**manifest, "complete": False})
    done = {answer.number for answer in read_entries(folder / ANSWERS, Answer)}

    def streams() -> Iterator[Stream]:
        for number, tokens in prompt_ids.items():
            if number not in done:
                options: Options = {
                    **GREEDY,
                    "drafter": drafter,
                    "max_tokens": settings.max_tokens,
                    "temperature": settings.temperatures[number % len(settings.temperatures)],
                    "seed": settings.seed + number,
                }
                stream = model.stream(tokens, **options)
                numbers[id(stream)] = number
                yield stream

    numbers: dict[int, int] = {}
    label = f"answers of {model.files.name}"
    with (
        appending(folder / ANSWERS) as append,
        progress.task(label, len(prompt_ids), unit="answers") as update,
        closing(as_they_end(streams(), at_once, _end_loops)) as ended,
    ):
        for stream in ended:
            number = numbers.pop(id(stream))
            done.add(number)
            result = stream.result
            looped = result.finish_reason == FinishReason.CANCELLED
            finish = "loop" if looped else str(result.finish_reason)
            append(asdict(Answer(number, prompt_ids[number], result.token_ids, finish)))
            update(len(done))
            if stop():
                break
    answers = read_entries(folder / ANSWERS, Answer)
    manifest |= {
        "complete": len(done) == len(prompt_ids),
        "answers": len(answers),
        "prompt_tokens": sum(len(answer.prompt) for answer in answers),
        "answer_tokens": sum(len(answer.answer) for answer in answers),
        "sha256": sha256_of(folder / ANSWERS),
    }
    with writing(folder):
        write_json(folder / MANIFEST, manifest)
    return manifest


def read_answers(folder: Path, fingerprint: str) -> list[Answer]:
    """The answers in `folder`, in the order of their prompts.

    Raises InvalidRequest if there are none, or they are of another model.
    """
    manifest = _read_manifest(folder)
    answers = read_entries(folder / ANSWERS, Answer)
    if manifest is None or not answers:
        raise InvalidRequest(
            f"{folder} has no answers to train on; make them with `paceline train answers`"
        )
    if manifest.get("fingerprint") != fingerprint:
        raise InvalidRequest(
            f"the answers in {folder} are those of {manifest.get('target')}, with other weights "
            f"than this target's, says {MANIFEST}; make them again with `paceline train answers`"
        )
    return sorted(answers, key=lambda answer: answer.number)


def provenance(folder: Path) -> dict[str, Any]:
    """Prompts and settings of the answers in `folder`."""
    manifest = _read_manifest(folder) or {}
    return {name: manifest.get(name) for name in ("prompts", *asdict(Settings()))}


def held_out(answers: Sequence[_T]) -> tuple[list[_T], list[_T]]:
    """Split into answers for training and one in twenty held out for evaluation."""
    return (
        [answer for i, answer in enumerate(answers) if i % _HELD_OUT],
        [answer for i, answer in enumerate(answers) if i % _HELD_OUT == 0],
    )


def _end_loops(stream: Stream) -> None:
    answer = stream.answer
    if not answer or len(answer) % _LOOP:
        return
    tail = answer[-_LOOP:]
    if any(answer[at : at + _LOOP] == tail for at in range(len(answer) - _LOOP)):
        stream.close()


def _about(
    model: Model, paths: Sequence[Path], suites: Sequence[Suite], settings: Settings
) -> dict[str, Any]:
    files = [
        {"name": path.name, "sha256": suite.sha256, "prompts": len(suite.prompts)}
        for path, suite in zip(paths, suites, strict=True)
    ]
    return {
        "kind": KIND,
        "version": 1,
        "paceline": paceline.__version__,
        "target": model.files.name,
        "fingerprint": model.files.fingerprint,
        "prompts": files,
        **json.loads(json.dumps(asdict(settings))),
    }


def _check_same(folder: Path, manifest: Mapping[str, Any]) -> None:
    old_manifest = _read_manifest(folder)
    if old_manifest is None:
        return
    for name in ("fingerprint", "prompts", *asdict(Settings())):
        if old_manifest.get(name) != manifest[name]:
            raise InvalidRequest(
                f"{folder} has answers with another {name} ({old_manifest.get(name)}, not "
                f"{manifest[name]}); choose another folder, or the settings it was begun with"
            )


def _prompt_tokens(model: Model, suites: Sequence[Suite], longest: int) -> dict[int, list[int]]:
    """Prompt number -> token ids, without duplicates."""
    seen = set()
    prompt_ids = {}
    longest = min(longest, model.engine.context_length - 1)
    prompts = [prompt for suite in suites for prompt in suite.prompts]
    for number, prompt in enumerate(prompts):
        tokens = model.tokens(prompt_for(model.files, prompt.messages))
        if len(tokens) <= longest and tuple(tokens) not in seen:
            seen.add(tuple(tokens))
            prompt_ids[number] = tokens
    return prompt_ids


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    if not (folder / MANIFEST).exists():
        return None
    manifest = read_json(folder / MANIFEST)
    if manifest.get("kind") != KIND:
        raise InvalidRequest(f"{folder} has no answers: its manifest.json is of another kind")
    return manifest
