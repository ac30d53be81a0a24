"""`paceline generate`: one prompt, one answer."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from paceline.cli import declare
from paceline.cli.answers import AnswerArguments, load_for_answers, print_end, step_printer
from paceline.cli.console import STDIN, as_unicode, json_text, piped_text, read_stdin, read_text
from paceline.cli.options import ModelOptions, Output, command
from paceline.errors import InvalidRequest
from paceline.options import IntRange

if TYPE_CHECKING:
    from paceline.models import ModelFiles
    from paceline.runtime.prompt import Prompt


@command(
    first=(
        *("model", "max_tokens", "temperature", "system", "file", "json_schema", "stats", "json"),
        "quiet",
    ),
    examples=(
        'paceline generate "Write a haiku about rain."',
        'git diff | paceline generate "Write a commit message." -n 60',
    ),
)
def generate(
    *,
    prompt: Annotated[
        str | None,
        Argument(
            parser=str,
            help="prompt text; piped input is appended. Omit it, or pass -, to read stdin only",
        ),
    ] = None,
    file: Annotated[
        Path | None, declare.file(help="a file to read after the prompt, or as the prompt")
    ] = None,
    tokens: Annotated[
        Any | None,
        Option(
            parser=declare.IntList(IntRange(0)),
            metavar="ID,ID",
            help="the prompt as token ids, without a chat template, instead of text",
        ),
    ] = None,
    no_stdin: Annotated[bool, Option("--no-stdin", help="do not read standard input")] = False,
    raw: Annotated[bool, declare.answer_option("raw")] = False,
    prediction: Annotated[
        Path | None, declare.file(help="text that the response is expected to repeat")
    ] = None,
    answer: AnswerArguments,
    model: ModelOptions,
    output: Output,
) -> int:
    """Answer one prompt."""
    from paceline.runtime.prompt import EncodedPrompt, check_room, encode_prompt
    from paceline.runtime.request import check

    if tokens and not (prompt is None and file is None):
        raise InvalidRequest("--tokens is the whole prompt; remove the text or --file")
    if prompt is None and file is None and not tokens:
        if no_stdin or sys.stdin.isatty():
            raise InvalidRequest(
                "the prompt is missing; give it as an argument, with --file, or piped in"
            )
        prompt = STDIN
    structures = [answer.given.get(name) for name in ("json_schema", "grammar")]
    readers = [prompt, str(file), str(prediction), *structures].count(STDIN)
    if readers > (not no_stdin):
        raise InvalidRequest("- reads standard input: give it once, and not with --no-stdin")
    content: Prompt = tokens or _prompt(prompt, file, output, joins_pipe=not (no_stdin or readers))
    if isinstance(content, str) and not raw:
        content = content.rstrip("\n")  # `echo Hello |` is "Hello", as in a chat
        if not content.strip():
            raise InvalidRequest("the prompt is empty; expected some text")
    expected = None if prediction is None else read_text(prediction, quiet=output.quiet)
    options = answer.options(raw=raw)
    if expected is not None:
        options["prediction"] = [0]  # its tokens, once there is a tokenizer
    request = check(options)  # before the model lookup
    encoded: list[EncodedPrompt] = []

    def encode(files: "ModelFiles") -> None:
        """Raise the errors that the prompt would cause once the model is open."""
        ids, rendered = encode_prompt(files, content, request)
        check_room(len(ids), files.context_length)
        encoded.append(EncodedPrompt(ids, rendered.thoughts))

    loaded = load_for_answers(model, answer, output, encode)
    if expected is not None:
        options["prediction"] = loaded.files.tokenizer.encode(expected)
    with loaded.stream(next(iter(encoded), content), **options) as stream:
        show = step_printer(answer, output, stream)
        for step in stream:
            show(step)
    if output.json:
        ids = stream.tokens[: stream.result.prompt_tokens]  # for `bench simulate`
        result = {**stream.result.as_dict(), "prompt_token_ids": ids}
        print(json_text(result))
    else:
        full = answer.stats or answer.given.get("probe")
        print_end(stream, output, stream.result.line() if full else None)
    sys.stdout.flush()
    loaded.flush()
    return 0


def _prompt(prompt: str | None, file: Path | None, output: Output, *, joins_pipe: bool) -> str:
    """Return the argument, then a file or piped text, with an empty line between."""
    parts = list[str]()
    if prompt == STDIN:
        parts.append(read_stdin(quiet=output.quiet))
    elif prompt is not None:
        parts.append(as_unicode(prompt, "the prompt"))
    if file is not None:
        parts.append(read_text(file, quiet=output.quiet))
    elif joins_pipe:
        parts.append(piped_text(output))
    if len(parts) == 1 or not (more := parts[1].strip("\n")).strip():
        return parts[0]
    return f"{parts[0]}\n\n{more}" if parts[0].strip() else more
