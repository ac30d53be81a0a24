"""`paceline train`: drafters that are trained for a target."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from paceline.cli import declare, numbers
from paceline.cli.console import print_report, progress_of
from paceline.cli.options import Output, Seed, command, default_model, group
from paceline.errors import InvalidRequest

app = group("Train a drafter for a target.")

Target = Annotated[
    str,
    Option(
        default_factory=default_model,
        show_default=False,
        help="the model to draft for: name, path or hub name",
    ),
]
Folder = Annotated[Path, Option("--out", parser=Path, metavar="FOLDER", help="the folder to make")]
BatchSize = Annotated[int, Option("--at-once", parser=numbers.COUNT, help="sequences of a call")]
Threads = Annotated[int | None, Option(parser=numbers.THREADS)]
Data = Annotated[
    list[Path] | None, Option(parser=Path, metavar="FOLDER...", help="folders of answers")
]
Prompts = Annotated[
    list[Path] | None,
    Option(parser=Path, metavar="FILE...", help="make the answers first, in OUT/answers"),
]


@command(
    app,
    examples=(
        "paceline train prompts --target qwen3-0.6b --out prompts.jsonl",
        "paceline train prompts --target qwen3-0.6b --count 5000 --seed 1 --out more.jsonl",
    ),
)
def prompts(
    *,
    count: Annotated[int, declare.count(help="prompts to make")] = 1000,
    temperature: Annotated[float, Option(parser=numbers.TEMPERATURE)] = 0.9,
    seed: Seed = 0,
    at_once: BatchSize = 32,
    threads: Threads = None,
    out: Annotated[Path, declare.file(help="the file to write")],
    target: Target,
    output: Output,
) -> int:
    """Let the target write prompts."""
    from paceline_lab.train import commands

    report = commands.prompts(
        target,
        out,
        count=count,
        temperature=temperature,
        seed=seed,
        at_once=at_once,
        threads=threads,
        progress=progress_of(output),
    )
    return print_report(report, output)


@command(
    app,
    examples=(
        "paceline train answers --target qwen3-0.6b --prompts prompts.jsonl --out answers",
        "paceline train answers --target qwen3-0.6b --prompts a.jsonl b.jsonl --out answers",
    ),
)
def answers(
    *,
    max_tokens: Annotated[int, declare.count(help="maximum tokens of an answer")] = 256,
    temperature: Annotated[
        list[float],
        declare.several(
            parser=numbers.TEMPERATURE, help="several take turns; may be repeated; default: 0"
        ),
    ],
    seed: Seed = 0,
    at_once: BatchSize = 32,
    threads: Threads = None,
    prompts: Annotated[
        list[Path], Option(parser=Path, metavar="FILE...", help="JSON lines with prompt")
    ],
    out: Folder,
    target: Target,
    output: Output,
) -> int:
    """Let the target answer prompts."""
    from paceline_lab.train import commands

    report = commands.answers(
        target,
        prompts,
        out,
        max_tokens=max_tokens,
        temperatures=temperature or [0.0],
        seed=seed,
        at_once=at_once,
        threads=threads,
        progress=progress_of(output),
    )
    return print_report(report, output)


@command(
    app,
    examples=(
        "paceline train table --target qwen3-0.6b --data answers --out table",
        "paceline train table --target qwen3-0.6b --prompts prompts.jsonl --out table",
    ),
)
def table(
    *,
    data: Data = None,
    prompts: Prompts = None,
    megabytes: Annotated[
        float, Option(parser=numbers.Real(0, 1e6, open=True), help="maximum size")
    ] = 16.0,
    out: Folder,
    target: Target,
    output: Output,
) -> int:
    """Count a table of the target's frequent continuations."""
    from paceline_lab.train import commands

    report = commands.table(
        target,
        _data(target, data, prompts, out, output),
        out,
        megabytes=megabytes,
        progress=progress_of(output),
    )
    return print_report(report, output)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Options of the training loop."""

    steps: Annotated[int, declare.count()] = 10_000
    texts: Annotated[int, declare.count(help="texts of a step")] = 4
    depth: Annotated[int, declare.count(help="draft tokens in a row that are trained")] = 4
    shallow: Annotated[
        float, Option(parser=numbers.Real(0, 1), help="share of the steps with a depth of 1, first")
    ] = 0.5
    dropout: Annotated[float, Option(parser=numbers.Real(0, 0.9))] = 0.1
    rate: Annotated[
        float, Option(parser=numbers.Real(0, 1, open=True), help="maximum learning rate")
    ] = 1e-3
    seed: Seed = 0
    evaluate_every: Annotated[int, declare.count(help="steps")] = 500


@command(
    app,
    examples=(
        "paceline train mtp --target qwen3-0.6b --data answers --out head",
        "paceline train mtp --target qwen3-0.6b --data answers --device cuda --out head",
    ),
)
def mtp(
    *,
    data: Data = None,
    prompts: Prompts = None,
    vocab: Annotated[int, declare.count(help="draft only the most frequent tokens")] = 8192,
    logits: Annotated[
        bool, Option(help="read logits in place of hidden states, to draft in any engine")
    ] = False,
    device: Annotated[str, Option(help="cpu or cuda")] = "cpu",
    schedule: Schedule,
    out: Folder,
    target: Target,
    output: Output,
) -> int:
    """Train a head that predicts tokens from the target's states (needs the extra train)."""
    from paceline_lab.train import commands

    commands.check_training(rate=schedule.rate, device=device)
    report = commands.mtp(
        target,
        _data(target, data, prompts, out, output),
        out,
        vocab=vocab,
        logits=logits,
        device=device,
        schedule=asdict(schedule),
        progress=progress_of(output),
    )
    return print_report(report, output)


def _data(
    target: str,
    folders: Sequence[Path] | None,
    prompts: Sequence[Path] | None,
    out: Path,
    output: Output,
) -> list[Path]:
    """Folders of answers to learn from; answers to `prompts` are made first."""
    from paceline_lab.train import commands

    found = list(folders or [])
    if prompts:
        made = out / "answers"
        commands.answers(target, prompts, made, progress=progress_of(output))
        found.append(made)
    if not found:
        raise InvalidRequest("nothing to learn from; give --data ANSWERS or --prompts FILE")
    return found
