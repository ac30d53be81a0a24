"""Implements the commands `train ...`; `cli` prints their reports."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.drafters.networks.target import TargetWeights, read_matrix, read_target
from paceline.drafters.table import entry_bytes
from paceline.drafters.table_counts import accuracy, count_table
from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine
from paceline.errors import InvalidRequest, MissingExtra
from paceline.models import ModelFiles, Progress, resolve
from paceline.runtime.load import load
from paceline.runtime.model import Model
from paceline.storage.files import held, writing
from paceline.storage.report import Report
from paceline_lab.figures import import_matplotlib
from paceline_lab.train.answers import (
    Answer,
    Settings,
    held_out,
    make_answers,
    provenance,
    read_answers,
)
from paceline_lab.train.config import default_head_config
from paceline_lab.train.hidden_states import record_hidden_states
from paceline_lab.train.prompts import LONGEST_PROMPT, write_prompts
from paceline_lab.train.table import write_table

_OPENING = 64
"""KV cache tokens for the chat template before the user's text."""


def prompts(
    target: str,
    out: Path,
    *,
    count: int,
    temperature: float,
    seed: int,
    at_once: int,
    threads: int | None,
    progress: Progress,
) -> Report:
    """Generate prompts with the target."""
    tokens = _OPENING + LONGEST_PROMPT
    model = _plain_model(target, at_once, tokens=tokens, threads=threads, progress=progress)
    total = write_prompts(
        model,
        out,
        count=count,
        seed=seed,
        temperature=temperature,
        at_once=at_once,
        progress=progress,
    )
    return Report({"prompts": total, "file": str(out)}, text=f"{total} prompts in {out}")


def answers(
    target: str,
    files: Sequence[Path],
    out: Path,
    *,
    progress: Progress,
    max_tokens: int = 256,
    temperatures: Sequence[float] = (0.0,),
    seed: int = 0,
    at_once: int = 32,
    threads: int | None = None,
) -> Report:
    """Generate the target's answers into a folder."""
    settings = Settings(max_tokens, tuple(temperatures), seed)
    tokens = settings.longest_prompt + max_tokens
    model = _plain_model(target, at_once, tokens=tokens, threads=threads, progress=progress)
    manifest = make_answers(model, files, out, settings, at_once=at_once, progress=progress)
    text = f"{manifest['answers']} answers, {manifest['answer_tokens']} tokens, in {out}"
    return Report(manifest, text=text)


def table(
    target: str, folders: Sequence[Path], out: Path, *, megabytes: float, progress: Progress
) -> Report:
    """Count a table from answers and evaluate it on one held-out answer in twenty."""
    if not 0 < megabytes < 1e6:
        raise InvalidRequest(f"a table of {megabytes} megabytes; expected more than 0")
    model = load(target, cache_tokens=_OPENING, drafters=("none",), progress=progress)
    fingerprint = model.files.fingerprint
    answers = [answer for folder in folders for answer in read_answers(folder, fingerprint)]
    training, kept_back = held_out(answers)
    if not training:
        raise InvalidRequest(f"one answer is too few to train on; make more in {folders[0]}")
    progress.say(f"counting {sum(len(answer.answer) for answer in training)} tokens")
    entries = count_table(training).best(
        int(megabytes * 1e6 / entry_bytes(model.engine.vocab_size))
    )
    facts: dict[str, Any] = {
        "made_from": [provenance(folder) for folder in folders],
        "answers": len(training),
        "answer_tokens": sum(len(answer.answer) for answer in training),
        "held_out": accuracy(entries, kept_back),
    }
    write_table(
        entries, out, target=model.files.name, vocab_size=model.engine.vocab_size, facts=facts
    )
    right, promised = facts["held_out"]["right"], facts["held_out"]["promised"]
    text = (
        f"{len(entries.keys)} entries in {out}; of held-out tokens it predicts {right:.1%} at a "
        f"mean probability of {promised:.1%}"
    )
    return Report({"folder": str(out), "entries": len(entries.keys), **facts}, text=text)


def check_training(*, rate: float, device: str) -> None:
    """Check packages and settings before any data is generated.

    Raises:
        MissingExtra: torch or matplotlib is not installed.
        InvalidRequest: a setting is out of range, or there is no such device.
    """
    try:
        import torch

        import_matplotlib()
    except ImportError as error:
        raise MissingExtra(
            f"training needs {error.name}; install it with: pip install 'paceline[train]'"
        ) from error
    if not 0 < rate < 1:
        raise InvalidRequest(f"rate is {rate}; expected a learning rate above 0 and below 1")
    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise InvalidRequest(f"there is no device {device} here; expected cpu, or cuda with a GPU")


def mtp(
    target: str,
    folders: Sequence[Path],
    out: Path,
    *,
    vocab: int,
    logits: bool,
    schedule: Mapping[str, Any],
    device: str,
    progress: Progress,
) -> Report:
    """Train an MTP head on answers; `out` also has the state of the run.

    It has EAGLE-3's form, or with `logits` reads these in place of hidden states.
    """
    from paceline_lab.train.plot import plot_curve

    files, graph = files_to_train_on(target, progress)
    curve = train_head(
        files,
        graph,
        _read_all(folders, files),
        out,
        vocab=vocab,
        logits=logits,
        schedule=schedule,
        device=device,
        progress=progress,
    )
    measured = curve[-1]
    picture = plot_curve(curve, out)
    tau, steps = measured["tau"], int(measured["step"])
    value = {"folder": str(out), "tau": tau, "steps": steps, "curve": curve}
    text = (
        f"a head that predicts {measured['named_1']:.1%} of held-out tokens, with tau {tau:.3f}, "
        f"is in {out}; see {picture.name}"
    )
    return Report(value, text=text)


def train_head(
    files: ModelFiles,
    graph: TargetWeights,
    answers: Sequence[Answer],
    out: Path,
    *,
    vocab: int,
    logits: bool,
    schedule: Mapping[str, Any],
    device: str,
    progress: Progress,
    recorded: Callable[[], bool] = lambda: False,
    over: Callable[[], float] = lambda: 0.0,
) -> Sequence[Mapping[str, float]]:
    """Train an MTP head in `out`, from where an earlier run was stopped.

    Args:
        files: the target, for openvino.
        graph: its weights, of `files_to_train_on`; changed.
        answers: of the target.
        out: gets the head, the state of the run, and the hidden states in `features`.
        vocab: tokens that the head can draft.
        logits: the head reads logits, and drafts in any engine; else hidden states.
        schedule: fields of `mtp.Schedule`; `epochs` over the answers in place of `steps`.
        device: that torch trains on.
        progress: reports tokens, then steps.
        recorded: called between answers; True: those whose hidden states are recorded are all.
        over: the share of the time for training that is over, as `Trainer.train` takes it. If it
            is 1 before the first step, nothing is trained.

    Returns:
        The evaluations on held-out answers, by step.

    Raises:
        InvalidRequest: too few answers, the state in `out` is of another run, or the target's
            logits do not follow from its hidden states.
        ModelError: the target cannot be read.
    """
    from paceline_lab.train.forms import Eagle3Form, HeadForm, LogitsForm
    from paceline_lab.train.logits import tokens_to_read
    from paceline_lab.train.mtp import Schedule, Trainer
    from paceline_lab.train.target_logits import TargetLogits, check_end
    from paceline_lab.train.target_tensors import most_frequent, share_weights

    least = tokens_to_read(graph.hidden_size) if logits else 1
    count = min(max(vocab, least), graph.vocab_size - 1)
    drafted = most_frequent(answers, count, vocab=graph.vocab_size, least=least)
    config = default_head_config(graph, draft_vocab_size=len(drafted))
    last = graph.layers - 1  # has the labels
    if logits:
        config = replace(config, taps=(last,))
    engine = _open(files, answers, {*config.taps, last})
    embeddings, head = read_matrix(graph.embeddings), read_matrix(graph.head)
    target_logits = TargetLogits(graph, drafted)
    check_end(engine, target_logits, drafted, answers[0].prompt)
    form: HeadForm
    if logits:
        form = LogitsForm(config, drafted, embeddings, head[drafted], target_logits)
    else:
        form = Eagle3Form(config, drafted, embeddings, target_logits, files.context_length)
    with _held(out):
        hidden_states = record_hidden_states(
            engine,
            answers,
            out / "features",
            fingerprint=f"{files.fingerprint}{form.name}",
            progress=progress,
            read=form.recorded,
            stop=recorded,
        )
        if over() >= 1:
            return []
        answers, schedule = answers[: len(hidden_states)], {**schedule}
        if epochs := schedule.pop("epochs", None):
            schedule["steps"] = max(epochs * len(answers) // schedule["texts"], 1)
        trainer = Trainer(
            config,
            share_weights(form.embeddings, head, drafted, device),
            hidden_states=hidden_states,
            answers=answers,
            form=form,
            schedule=Schedule(**schedule),
            folder=out,
            device=device,
        )
        trainer.train(progress, over)
        return trainer.curve


def _plain_model(
    target: str, at_once: int, *, tokens: int, threads: int | None, progress: Progress
) -> Model:
    """The target, to decode `at_once` sequences of up to `tokens` tokens without drafts."""
    # One row per sequence doubles throughput, and texts to learn from need no exact decoding.
    return load(
        target,
        rows=1,
        cache_tokens=at_once * tokens,
        contexts=at_once,
        threads=threads,
        drafters=("none",),
        progress=progress,
    )


@contextmanager
def _held(out: Path) -> Iterator[None]:
    """Lock a run's folder, created if missing: two runs at once would write one file."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with held(out):
        yield


def files_to_train_on(target: str, progress: Progress) -> tuple[ModelFiles, TargetWeights]:
    """Files of a target in the form for openvino, and what a drafter shares with it."""
    files = resolve(target, progress=progress)
    if files.engine != "openvino":
        raise InvalidRequest(
            f"{target} is for the engine {files.engine}; training needs the form for openvino"
        )
    return files, read_target(files.path)


def _read_all(folders: Sequence[Path], files: ModelFiles) -> list[Answer]:
    return [answer for folder in folders for answer in read_answers(folder, files.fingerprint)]


def _open(files: ModelFiles, answers: Sequence[Answer], taps: set[int]) -> Engine:
    """The target, to record hidden states after the layers `taps`."""
    longest = max(len(answer.tokens) for answer in answers)
    settings = EngineSettings(cache_tokens=longest, taps=tuple(sorted(taps)))
    return open_engine("openvino", files.path, files.context_length, settings)
