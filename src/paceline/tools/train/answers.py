"""The target's own answers, as data: a drafter learns to guess what this model would say.

They are kept as a folder: `answers.jsonl`, a line for each answer with the token ids of prompt and
answer, and `manifest.json`, which says what they are answers of. The folder grows answer by answer,
and a stopped run goes on where it was.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import paceline
from paceline.decoding.types import FinishReason
from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.runtime.loop import as_they_end
from paceline.runtime.model import Model
from paceline.runtime.options import GREEDY, Options, check
from paceline.runtime.stream import Stream
from paceline.storage.files import read_json, sha256_of, write_json, writing
from paceline.storage.json_lines import appending, read_journal
from paceline.storage.manifest import MANIFEST, begin_artifact
from paceline.tools.suite import Suite, load_suite

ANSWERS = "answers.jsonl"
KIND = "paceline answers"

_T = TypeVar("_T")

_FIELDS = {"number": int, "prompt": list, "answer": list}

_HELD_OUT = 20

_LOOP = 32
"""An answer whose last so many tokens stood in it before is going round in circles."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides an answer; the same in all of a folder."""

    max_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0,)
    """They take turns, prompt by prompt."""
    seed: int = 0
    longest_prompt: int = 1024
    """Tokens; prompts with more are left out."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: token ids, as the target reads and writes them."""

    number: int
    prompt: Sequence[int]
    answer: Sequence[int]

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
) -> dict[str, Any]:
    """Answer the prompts of some files into `folder`; what is there already is not made again.

    An answer ends early when it repeats itself: the rest would only say so again.

    Args:
        model: the target, with a cache for `at_once` sequences.
        prompts: files of JSON lines (see `load_suite`); a prompt that is there twice counts once.
        folder: made when needed.
        settings: what decides an answer.
        at_once: sequences in a call.
        progress: told how far it is.

    Returns:
        The manifest.

    Raises:
        InvalidRequest: the folder has answers of another model, of other prompts or made otherwise.
    """
    for temperature in settings.temperatures:
        check(
            {"max_tokens": settings.max_tokens, "temperature": temperature, "seed": settings.seed}
        )
    suites = [load_suite(path) for path in prompts]
    manifest = _about(model, prompts, suites, settings)
    begin_artifact(folder, KIND)
    _check_same(folder, manifest)
    todo = _prompt_tokens(model, suites, settings.longest_prompt)
    with writing(folder):
        write_json(folder / MANIFEST, {**manifest, "complete": False})
    done = {entry["number"] for entry in read_journal(folder / ANSWERS, _FIELDS)}

    def streams() -> Iterator[Stream]:
        for number, tokens in todo.items():
            if number not in done:
                options: Options = {
                    **GREEDY,
                    "drafter": "none",
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
        progress.task(label, len(todo), unit="answers") as reach,
    ):
        for stream in as_they_end(streams(), at_once, _end_loops):
            number = numbers.pop(id(stream))
            done.add(number)
            result = stream.result
            looped = result.finish_reason == FinishReason.CANCELLED
            finish = "loop" if looped else str(result.finish_reason)
            append(
                {
                    "number": number,
                    "prompt": todo[number],
                    "answer": result.token_ids,
                    "finish": finish,
                }
            )
            reach(len(done))
    answers = read_journal(folder / ANSWERS, _FIELDS)
    manifest |= {
        "complete": True,
        "answers": len(answers),
        "prompt_tokens": sum(len(entry["prompt"]) for entry in answers),
        "answer_tokens": sum(len(entry["answer"]) for entry in answers),
        "sha256": sha256_of(folder / ANSWERS),
    }
    with writing(folder):
        write_json(folder / MANIFEST, manifest)
    return manifest


def read_answers(folder: Path, fingerprint: str) -> list[Answer]:
    """The answers in `folder`, in the order of their prompts.

    Raises:
        InvalidRequest: there are none, or they are another model's.
    """
    manifest = _read_manifest(folder)
    entries = read_journal(folder / ANSWERS, _FIELDS)
    if manifest is None or not entries:
        raise InvalidRequest(
            f"{folder} has no answers to learn from; make them with `paceline train answers`"
        )
    if manifest.get("fingerprint") != fingerprint:
        raise InvalidRequest(
            f"the answers in {folder} are those of {manifest.get('target')}, with other weights "
            f"than this target's, says {MANIFEST}; make them again with `paceline train answers`"
        )
    found = [Answer(entry["number"], entry["prompt"], entry["answer"]) for entry in entries]
    return sorted(found, key=lambda answer: answer.number)


def provenance(folder: Path) -> dict[str, Any]:
    """What the answers in `folder` are answers to, and how they were made."""
    manifest = _read_manifest(folder) or {}
    return {name: manifest.get(name) for name in ("prompts", *asdict(Settings()))}


def held_out(answers: Sequence[_T]) -> tuple[list[_T], list[_T]]:
    """The answers to learn from, and one in twenty that is only for looking how it goes."""
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
    here = _read_manifest(folder)
    if here is None:
        return
    for name in ("fingerprint", "prompts", *asdict(Settings())):
        if here.get(name) != manifest[name]:
            raise InvalidRequest(
                f"{folder} has answers with another {name} ({here.get(name)}, not "
                f"{manifest[name]}); choose another folder, or the settings it was begun with"
            )


def _prompt_tokens(model: Model, suites: Sequence[Suite], longest: int) -> dict[int, list[int]]:
    """Prompt number -> token ids, each different prompt once."""
    seen = set()
    chosen = {}
    longest = min(longest, model.engine.context_length - 1)
    prompts = [prompt for suite in suites for prompt in suite.prompts]
    for number, prompt in enumerate(prompts):
        tokens = model.tokens(prompt.messages)
        if len(tokens) <= longest and tuple(tokens) not in seen:
            seen.add(tuple(tokens))
            chosen[number] = tokens
    return chosen


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    if not (folder / MANIFEST).exists():
        return None
    manifest = read_json(folder / MANIFEST)
    if manifest.get("kind") != KIND:
        raise InvalidRequest(f"{folder} holds no answers: its manifest.json says otherwise")
    return manifest
