"""`paceline decide`: questions about a text, answered with probabilities."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from typer import Argument

from paceline.cli import declare
from paceline.cli.console import STDIN, as_unicode, load_model, print_table, print_value, read_text
from paceline.cli.options import ModelOptions, Output, command
from paceline.errors import InvalidRequest


@command(
    first=("model", "choice", "level", "questions", "file", "json", "quiet"),
    examples=(
        "paceline decide 'The customer is angry.' --file mail.txt",
        "git diff | paceline decide 'What is changed?' --choice code --choice tests",
        "paceline decide --questions questions.json --file mail.txt --json",
    ),
)
def decide(
    *,
    question: Annotated[
        str | None,
        Argument(parser=str, help="a statement to judge, or a question with options"),
    ] = None,
    choice: Annotated[
        list[str], declare.several(metavar="OPTION", help="an option to choose; repeatable")
    ],
    level: Annotated[
        list[str],
        declare.several(metavar="LEVEL", help="a level of a score, lowest first; repeatable"),
    ],
    questions: Annotated[
        Path | None,
        declare.file(help="further questions: a JSON list in the format of OpenAI's API"),
    ] = None,
    file: Annotated[Path | None, declare.file(help="the text; default: standard input")] = None,
    model: ModelOptions,
    output: Output,
) -> int:
    """Answer questions about a text with probabilities."""
    from paceline.runtime.decisions import read_questions

    if str(questions) == str(file or STDIN) == STDIN:
        raise InvalidRequest("- reads standard input: give it once, for the text or the questions")
    if choice and level:
        raise InvalidRequest("--choice and --level cannot be combined: a question has one of them")
    if question is None and (choice or level):
        raise InvalidRequest("options need a question; give it as an argument")
    asked = [] if questions is None else _question_list(questions)
    if question is not None:
        asked.append(_question(as_unicode(question, "the question"), choice, level))
    if not asked:
        raise InvalidRequest("the question is missing; give it as an argument or with --questions")
    read_questions(asked)  # a wrong one is rejected before the model lookup
    if file is None and sys.stdin.isatty():
        raise InvalidRequest("the text is missing; give it with --file, or piped in")
    text = read_text(file or Path(STDIN), quiet=output.quiet)
    with load_model(model, output, drafters=["none"]) as loaded:
        result = loaded.decide(text, asked)
    if output.json:
        print_value(output, result.as_dict(), "")
        return 0
    rows = list[list[str]]()
    for answer in result.answers:
        of_question = answer.question
        label = answer.choice if isinstance(answer.choice, str) else json.dumps(answer.choice)
        best = f"{answer.score:.2f}" if of_question.type == "score" else label
        first = [of_question.name or of_question.instructions, best]
        for option, part in zip(of_question.options.values(), answer.probabilities, strict=True):
            rows.append([*first, option, f"{part:.4f}"])
            first = ["", ""]
    print_table(["question", "answer", "option", "probability"], rows)
    return 0


def _question(text: str, choices: list[str], levels: list[str]) -> dict[str, Any]:
    if choices:
        listed = [{"value": one} for one in choices]
        return {"type": "choice", "instructions": text, "choices": listed}
    if levels:
        labels = [{"label": one} for one in levels]
        return {"type": "score", "instructions": text, "levels": labels}
    return {"type": "predicate", "instructions": text}


def _question_list(path: Path) -> list[Any]:
    try:
        listed = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not JSON: {error}") from error
    if not isinstance(listed, list):
        raise InvalidRequest(f"{path} should have a list of questions")
    return listed
