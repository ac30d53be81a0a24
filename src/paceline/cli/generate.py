"""`paceline generate`: one prompt, one answer."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from paceline.cli import declare
from paceline.cli.answers import AnswerArguments, load_for_answers, print_end, step_printer
from paceline.cli.console import as_unicode, piped_text, read_stdin, read_text
from paceline.cli.options import ModelOptions, Output, command, group
from paceline.errors import InvalidRequest

if TYPE_CHECKING:
    from paceline.models import ModelFiles
    from paceline.runtime.request import Request

app = group()


@command(
    app,
    first=("model", "max_tokens", "temperature", "system", "file", "stats", "json", "quiet"),
    examples=(
        'paceline generate "Write a haiku about rain."',
        'git diff | paceline generate "Write a commit message." -n 60',
    ),
    bars={"raw": ("system",), "json": ("tint",), "quiet": ("stats",)},
)
def generate(
    *,
    prompt: Annotated[
        str | None,
        Argument(parser=str, help="the prompt, before what is piped in; - or nothing: that alone"),
    ] = None,
    file: Annotated[Path | None, declare.file(help="read the prompt from a file")] = None,
    raw: Annotated[bool, Option("--raw", help="no chat template")] = False,
    prediction: Annotated[
        Path | None, declare.file(help="text that the answer shares much of")
    ] = None,
    answer: AnswerArguments,
    model: ModelOptions,
    output: Output,
) -> int:
    """Answer one prompt."""
    from paceline.runtime.request import check

    text = _prompt(prompt, file, output)
    if not (raw or text.strip()):
        raise InvalidRequest("the prompt is empty; expected some text")
    messages: Any = text
    if answer.system is not None:
        messages = [
            {"role": "system", "content": as_unicode(answer.system, "--system")},
            {"role": "user", "content": text},
        ]
    expected = None if prediction is None else read_text(prediction)
    options = answer.options(raw=raw)
    request = check(options)  # before the model is looked for
    loaded = load_for_answers(
        model, answer, output, partial(_check, messages=messages, request=request)
    )
    if expected is not None:
        options["prediction"] = loaded.files.tokenizer.encode(expected)
    with loaded.stream(messages, **options) as stream:
        show = step_printer(answer, output, stream)
        for step in stream:
            show(step)
    if output.json:
        ids = stream.tokens[: stream.result.prompt_tokens]  # `bench simulate` needs them
        result = {**stream.result.as_dict(), "prompt_token_ids": ids}
        print(json.dumps(result, ensure_ascii=False))
    else:
        full = answer.stats or answer.probe
        print_end(stream.result, output, stream.result.line() if full else None)
    sys.stdout.flush()
    loaded.settle()
    return 0


def _check(files: "ModelFiles", messages: Any, request: "Request") -> None:
    """Raise what the prompt and the options would raise once the model is open."""
    from paceline.runtime.prompt import check_room, encode_prompt

    check_room(len(encode_prompt(files, messages, request)[0]), files.context_length)


def _prompt(prompt: str | None, file: Path | None, output: Output) -> str:
    """The prompt: the argument and what is piped in after it, a file, or standard input."""
    if prompt is not None and file is not None:
        raise InvalidRequest("give the prompt as an argument or with --file, not both")
    if file is not None:
        return read_text(file)
    if prompt is not None and prompt != "-":
        text = piped_text(output).strip("\n")
        prompt = as_unicode(prompt, "the prompt")
        return f"{prompt}\n\n{text}" if text.strip() else prompt
    if sys.stdin.isatty() and prompt is None:
        raise InvalidRequest("there is no prompt; give it as an argument, with --file, or piped in")
    return read_stdin()
