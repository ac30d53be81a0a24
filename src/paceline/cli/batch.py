"""`paceline batch`: a file of requests in, a file of responses out."""

import asyncio
import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from io import StringIO
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from paceline.cli import declare
from paceline.cli.answers import AnswerArguments, load_for_answers
from paceline.cli.console import check_writable, print_status, print_value, progress_of, read_text
from paceline.cli.options import ModelOptions, Output, command
from paceline.errors import InvalidRequest
from paceline.options import IntRange, Options

if TYPE_CHECKING:
    from paceline.cli.response_file import ResponseFile
    from paceline.models import Progress
    from paceline.server.offline import Line, Offline, RayOffline

_MAX_NAMED = 20  # maximum faulty lines in an error
_CHECKED = 64  # lines, before progress is shown

_NAME = re.compile(r"\{([^{}\n\":,]+)\}")
"""A column in a template; not JSON."""

_FIELD = 2**30  # maximum characters of a CSV field


@command(
    first=("model", "output_file", "max_tokens", "temperature", "skip_errors", "json", "quiet"),
    examples=(
        "paceline batch prompts.jsonl -o answers.jsonl  # the same command continues",
        "paceline batch words.csv --template 'Translate {word} into French.' -o french.jsonl",
    ),
)
def batch(
    *,
    file: Annotated[
        Path,
        Argument(
            parser=Path,
            help='JSON lines: OpenAI batch requests, or {"prompt": ...} or {"messages": ...} with '
            "options; - reads standard input",
        ),
    ],
    output_file: Annotated[Path, declare.file("-o", "--output", help="file for the responses")],
    template: Annotated[
        str | None, Option(help="the prompt for each row of a CSV file; {name} is its column")
    ] = None,
    skip_errors: Annotated[
        bool, Option("--skip-errors", help="write faulty lines as errors, and run the others")
    ] = False,
    unordered: Annotated[
        bool, Option("--unordered", help="write responses as they complete, not in input order")
    ] = False,
    alias: Annotated[
        list[str] | None, Option(help="another name of the model in requests; may be repeated")
    ] = None,
    parallel: Annotated[
        int, Option(parser=IntRange(1, 32), help="requests that share forward passes in llamacpp")
    ] = 1,
    ray: Annotated[
        str | None,
        Option(
            metavar="ADDRESS", help="run on a Ray cluster: local, auto, HOST:PORT, or ray://..."
        ),
    ] = None,
    cpus: Annotated[
        int | None, declare.count(help="with --ray: CPUs of each model; default: a machine's")
    ] = None,
    defaults: Options,
    model: ModelOptions,
    output: Output,
) -> int:
    """Answer a file of requests."""
    from paceline.cli.response_file import ResponseFile
    from paceline.server.offline import EMBEDDINGS, Offline, RayOffline
    from paceline.server.run import CONTEXTS
    from paceline.server.settings import Settings

    check_writable(output_file)
    content = read_text(file, quiet=output.quiet)
    lines, faults = _lines(
        _json_lines(content) if template is None else _csv_rows(content, template)
    )
    if not lines:
        raise InvalidRequest(f"{file} has no requests; expected a JSON object per line")
    given = [  # 0 equals False, and --no-think is False
        name
        for name, value in defaults.items()
        if value is not None and value != [] and (value is not False or name == "think")
    ]
    if given and (posted := [line.number for line in lines if line.url]):
        raise InvalidRequest(
            f"{given[0]} on the command line is for prompts, and line {posted[0]} is a request "
            "with a body; write the option into the bodies"
        )
    _refuse(faults, file, skip_errors=skip_errors)
    answer = AnswerArguments(given=defaults)
    options = answer.options()
    load = partial(
        load_for_answers,
        model,
        answer,
        output if ray is None else Output(quiet=True),
        lambda _: None,
        contexts=CONTEXTS,
        parallel=parallel,
        embeddings=any(line.url == EMBEDDINGS for line in lines),
    )
    settings = Settings(aliases=tuple(alias or ()))
    progress, started = progress_of(output), monotonic()
    offline: Offline | RayOffline
    if ray is None:
        offline = Offline(load(), settings, options)
    else:
        offline = RayOffline(ray, cpus, load, settings, options)
    with offline:
        ids = [offline.id_of(line) for line in lines]
        responses = ResponseFile(output_file, ids, ordered=not unordered)
        left = [line for id, line in zip(ids, lines, strict=True) if id not in responses]
        sound = [line for line in left if line.number not in faults]
        with progress.task("checking requests", len(sound), unit="requests") as update:
            for at in range(0, len(sound), _CHECKED):
                part = sound[at : at + _CHECKED]
                found = zip(part, offline.faults(part), strict=True)
                faults |= {line.number: fault for line, fault in found if fault}
                update(at + len(part))
        _refuse(faults, file, skip_errors=skip_errors)
        _answer(offline, left, faults, responses, progress)
    seconds = monotonic() - started
    value = responses.summary() | {"answered": len(left), "seconds": seconds}
    text = (
        f"{value['requests']} responses in {output_file}, {value['failed']} of them errors; "
        f"{len(left)} made in {seconds:.1f} s, {value['cached_tokens']} of "
        f"{value['prompt_tokens']} prompt tokens from the cache"
    )
    if not output.quiet or output.json:
        print_value(output, value, text)
    return 1 if value["failed"] else 0


def _answer(
    offline: "Offline | RayOffline",
    left: Sequence["Line"],
    faults: Mapping[int, str],
    responses: "ResponseFile",
    progress: "Progress",
) -> None:
    """Write the missing responses. After Ctrl-C, print how to continue."""

    async def run(update: Callable[[int], None]) -> None:
        sound = [line for line in left if line.number not in faults]
        async for response in offline.responses(sound):
            append(response)
            update(len(responses))

    try:
        with (
            responses.appending() as append,
            progress.task("answering", responses.total, unit="requests", shows_rate=True) as update,
        ):
            for line in left:
                if line.number in faults:
                    append(offline.refusal(line, faults[line.number]))
            asyncio.run(run(update))
    except KeyboardInterrupt:
        print_status(
            f"[stopped: {len(responses)} of {responses.total} responses are in "
            f"{responses.path}; the same command continues]"
        )
        raise
    responses.finish()


def _json_lines(content: str) -> Iterator[tuple[int, Any]]:
    """Yield the number of each line, and its JSON value or an InvalidRequest."""
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                value = InvalidRequest(f"is not JSON: {error}")
            yield number, value


def _csv_rows(content: str, template: str) -> Iterator[tuple[int, Any]]:
    """Yield the number of each row's last line, and its prompt or an InvalidRequest."""
    csv.field_size_limit(_FIELD)
    reader = csv.DictReader(StringIO(content, newline=""), strict=True)
    try:
        columns = reader.fieldnames or ()
        if missing := {*_NAME.findall(template)} - {*columns}:
            raise InvalidRequest(
                f"the template has {{{min(missing)}}}; the columns are {', '.join(columns)}"
            )
        for row in reader:
            value: Any = {"prompt": _filled(template, {name: row[name] or "" for name in columns})}
            if None in row or None in row.values():
                value = InvalidRequest(f"has other columns than the {len(columns)} of the header")
            yield reader.line_num, value
    except csv.Error as error:  # where the next row begins is unknown
        raise InvalidRequest(f"line {reader.line_num} is not CSV: {error}") from error


def _filled(template: str, values: Mapping[str, str]) -> str:
    return _NAME.sub(lambda name: values[name[1]], template)


def _lines(values: Iterator[tuple[int, Any]]) -> tuple[list["Line"], dict[int, str]]:
    """Return the requests, and number -> fault of faulty ones."""
    from paceline.server.offline import Line, line_of

    lines, faults, numbers = list["Line"](), dict[int, str](), dict[str, int]()
    for number, value in values:
        try:
            line = line_of(number, value)
        except InvalidRequest as error:
            faults[number] = str(error)
            line = Line(number, f"line-{number}", None, {"faulty": str(value)})
        if (first := numbers.setdefault(line.custom_id, number)) != number:
            faults[number] = f"line {first} has the same custom_id, {line.custom_id!r:.60}"
            line = Line(number, f"line-{number}", None, line.body)
        lines.append(line)
    return lines, faults


def _refuse(faults: Mapping[int, str], file: Path, *, skip_errors: bool) -> None:
    """Raise InvalidRequest, which names the faulty lines, unless they are skipped."""
    if faults and not skip_errors:
        named = [f"line {number}: {faults[number]}" for number in sorted(faults)]
        if (more := len(named) - _MAX_NAMED) > 0:
            named[_MAX_NAMED:] = [f"and {more} more"]
        what = f"{file} has {len(faults)} faulty lines; fix them, or skip them with --skip-errors"
        raise InvalidRequest("\n  ".join([what, *named]))
