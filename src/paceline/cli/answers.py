"""What `generate` and `chat` share: the options of an answer, and how its steps are printed."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from paceline.cli import complete, numbers
from paceline.cli.console import check_kept, load_model, read_text, say, screen_text
from paceline.cli.options import (
    MAX_TOKENS,
    MODEL_VARIABLE,
    SAMPLING,
    GenerationConfig,
    ModelOptions,
    Output,
)
from paceline.errors import InvalidRequest
from paceline.options import STRUCTURES

if TYPE_CHECKING:
    from paceline.decoding.types import Step
    from paceline.models import ModelFiles
    from paceline.options import Options
    from paceline.runtime.model import Model
    from paceline.runtime.result import Result
    from paceline.runtime.stream import Stream

_answer = partial(Option, rich_help_panel="Answer")
_sampling = partial(Option, rich_help_panel=SAMPLING)
_drafting = partial(Option, rich_help_panel="Speculation")


def _number(name: str, about: str, *short: str) -> Any:
    words = (*short, f"--{name.replace('_', '-')}")
    return _sampling(*words, parser=numbers.of(name), help=about)


_STRUCTURE = re.compile(r"^\s*(\{|\w[\w-]*\s*::=|start\s*:)", re.MULTILINE)
"""The beginning of a schema, or a line of a grammar: no name of a file."""

_TRIAL_SHARE = 3  # 1 / this of memory, at most, has a suggested model
_TRIAL_SPEED = 5  # fewest expected tokens/s of a suggested model
_CORE_BANDWIDTH, _BANDWIDTH = 5e9, 40e9
"""Estimated bytes of weights per second, read by a CPU and by all CPUs of a machine. Two CPUs of
shared servers read 7 to 19 GB/s of SmolLM2 135M and 10 of a 1.7B in Q4_K_M (November 2026)."""

SAME_NAME = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed", "max_tokens", "drafter", "policy", "max_block", "probe"),
)
"""Options that `paceline.Options` has under the same name."""


@dataclass(frozen=True, slots=True)
class AnswerArguments:
    """What the command line says of an answer; `options` has it as `Options`."""

    system: Annotated[
        str | None, Option("-s", "--system", help="a system message: how to answer")
    ] = None
    stats: Annotated[
        bool, Option("--stats", help="how it went: speed, accepted drafts, engine and seed")
    ] = False
    tint: Annotated[bool, Option("--tint", help="colour the accepted draft tokens")] = False
    max_tokens: Annotated[
        int | None,
        _answer(
            "-n",
            "--max-tokens",
            parser=numbers.LIMIT,
            help="maximum tokens of an answer; -1: until the context is full; "
            f"default: {MAX_TOKENS}",
        ),
    ] = None
    repetition_detection: Annotated[
        bool | None,
        _answer(
            "--repetition-detection/--no-repetition-detection",
            help="stop an answer that repeats itself; default: unless --ignore-eos",
        ),
    ] = None
    stop: Annotated[
        list[str] | None, _answer(help="a string that ends the answer; may be repeated")
    ] = None
    json_schema: Annotated[
        str | None,
        _answer("--schema", metavar="FILE|JSON", help="answer in JSON that matches this schema"),
    ] = None
    regex: Annotated[str | None, _answer(help="answer with a match of this regular expression")] = (
        None
    )
    grammar: Annotated[
        str | None,
        _answer(metavar="FILE", help="answer by this grammar, in llguidance's Lark or GBNF"),
    ] = None
    ignore_eos: Annotated[bool, _answer("--ignore-eos", help="go on after the end token")] = False
    parse_special: Annotated[
        bool,
        _answer("--parse-special", help="names of control tokens in messages become the tokens"),
    ] = False
    think: Annotated[
        bool | None,
        _answer(
            "--think/--no-think",
            help="turn a model's thinking on or off; default: as its chat template has it",
        ),
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        _answer(
            parser=numbers.json_object,
            metavar="JSON",
            help="variables for the chat template, as an object",
        ),
    ] = None
    generation_config: GenerationConfig = "auto"
    temperature: Annotated[
        float | None,
        _number("temperature", "0 takes the likeliest token each time; 0.7 varies", "-t"),
    ] = None
    top_k: Annotated[int | None, _number("top_k", "keep the k most likely tokens")] = None
    top_p: Annotated[
        float | None, _number("top_p", "keep the fewest tokens with this much probability")
    ] = None
    min_p: Annotated[
        float | None, _number("min_p", "keep tokens this likely relative to the best")
    ] = None
    repetition_penalty: Annotated[
        float | None, _number("repetition_penalty", "divide the logits of tokens in the context")
    ] = None
    presence_penalty: Annotated[
        float | None,
        _number("presence_penalty", "subtract from the logits of tokens in the answer"),
    ] = None
    frequency_penalty: Annotated[
        float | None, _number("frequency_penalty", "the same, for each occurrence")
    ] = None
    seed: Annotated[int | None, _number("seed", "the same seed gives the same tokens")] = None
    logit_bias: Annotated[
        list[Any] | None,
        _sampling(
            parser=numbers.bias,
            metavar="TOKEN=BIAS",
            help="add to a token's logit; may be repeated",
        ),
    ] = None
    drafter: Annotated[
        str | None,
        _drafting(
            autocompletion=complete.drafters,
            help="what guesses the next tokens, for the model to verify: auto, none, or parts "
            "joined by +; never changes the answer",
        ),
    ] = None
    policy: Annotated[
        str | None,
        _drafting(
            help="how many tokens are drafted: auto, by measured costs; fixed, adaptive or kelly"
        ),
    ] = None
    max_block: Annotated[
        int | None,
        _drafting(parser=numbers.BLOCK, help="most tokens that one call verifies, 2 to 32"),
    ] = None
    probe: Annotated[
        str | None, _drafting(metavar="DRAFTER", help="count what another drafter would have done")
    ] = None
    keep: Annotated[
        bool,
        _drafting(
            "--keep/--no-keep",
            envvar="PACELINE_KEEP",
            help="keep answers, and what is typed in a chat, on this machine, and draft later "
            "answers from them; `paceline forget` removes both",
        ),
    ] = False

    def options(self, *, raw: bool = False) -> "Options":
        """The options of `Model.stream`, without those that were left out."""
        options: Any = {
            name: value for name in SAME_NAME if (value := getattr(self, name)) is not None
        }
        for name in STRUCTURES:
            if (value := getattr(self, name)) is not None:
                options[name] = structure_of(name, value)
        if self.max_tokens == -1:
            options["max_tokens"] = None
        if self.stop:
            options["stop"] = self.stop
        detect = self.repetition_detection
        options |= {
            "repetition_detection": not self.ignore_eos if detect is None else detect,
            "logit_bias": dict(self.logit_bias or ()),
            "template_kwargs": self.chat_template_kwargs or {},
            "think": self.think,
            "ignore_eos": self.ignore_eos,
            "parse_special": self.parse_special,
            "raw": raw,
        }
        result: Options = options
        return result


def structure_of(name: str, value: str) -> str:
    """Return the text of a schema, grammar or expression: the value, or that of the file it names.

    The schema `json` is that of any object, as in ollama.
    """
    if name == "json_schema" and value == "json":
        return '{"type": "object"}'
    given = name == "regex" or not value or _STRUCTURE.search(value)
    text = value if given else read_text(Path(value))
    if name == "json_schema":
        try:
            json.loads(text)
        except ValueError as error:
            source = "the schema" if given else value
            raise InvalidRequest(f"{source} is not JSON: {error}") from error
    return text


def load_for_answers(
    model: ModelOptions,
    answer: AnswerArguments,
    output: Output,
    check: "Callable[[ModelFiles], object]",
) -> "Model":
    """The model, with MAX_TOKENS as the limit of answers without one; `check` as for `load`."""
    drafters = [answer.drafter or "auto", *filter(None, [answer.probe])]
    check_kept(drafters, keep=answer.keep)
    if not output.quiet and (notice := trial_notice(model.model)):
        say(notice)
    loaded = load_model(
        model,
        output,
        drafters=drafters,
        generation_config=answer.generation_config,
        keep=answer.keep,
        check=check,
    )
    if answer.think is False and not (output.quiet or loaded.files.thinking.switch(False)):
        say(f"[--no-think has no effect: {loaded.files.name} does not support reasoning]")
    loaded.defaults = replace(loaded.defaults, fallback={"max_tokens": MAX_TOKENS})
    return loaded


def trial_notice(name: str) -> str | None:
    """Two lines for the first use of the default model; None: it is another, or is here already."""
    from paceline.models import DEFAULT_MODEL, cache_dir, list_models
    from paceline.storage.files import megabytes
    from paceline.system.machine import cpu_cores, memory_bytes

    if name != DEFAULT_MODEL or any((cache_dir() / "models").glob(f"{DEFAULT_MODEL}*")):
        return None
    notice = f"{name} is a small model to try paceline with."
    bandwidth = min(cpu_cores() * _CORE_BANDWIDTH, _BANDWIDTH)
    most = min(memory_bytes() / _TRIAL_SHARE, bandwidth / _TRIAL_SPEED)
    models = [model for model in list_models() if model.to_fetch <= most]
    best = max(models, key=lambda model: model.to_fetch, default=None)
    if best is None or best.name == name:
        return notice
    return (
        f"{notice} A better one for this machine is {best.name}, estimated at "
        f"{bandwidth / best.to_fetch:.0f} tokens/s on {cpu_cores()} CPUs: `paceline pull "
        f"{best.name}` ({megabytes(best.to_fetch)}), then -m {best.name} or "
        f"{MODEL_VARIABLE}={best.name}."
    )


def step_printer(
    answer: AnswerArguments, output: Output, stream: "Stream"
) -> "Callable[[Step], None]":
    """A function that prints the steps of one answer; with --json nothing.

    Thoughts go to standard error, dim, unless --quiet.
    """

    def printed(step: "Step") -> None:
        print(screen_text(step.text, sys.stdout), end="", flush=True)

    if output.json:
        return lambda _: None
    show = highlighter() if answer.tint else printed
    if output.quiet or stream.request.thoughts is None:
        return show
    think, thinking = printer("dim", stderr=True), False

    def show_both(step: "Step") -> None:
        nonlocal thinking
        if step.reasoning:
            think(step.reasoning, "")
            thinking = True
        if thinking and step.text:
            think("\n\n", "")
            thinking = False
        show(step)

    return show_both


def highlighter() -> "Callable[[Step], None]":
    """A function that prints a step with its accepted draft tokens underlined, and green."""
    show = printer("green underline")

    def show_step(step: "Step") -> None:
        texts = [piece.final for piece in step.pieces]
        show("".join(texts[: step.accepted]), "".join(texts[step.accepted :]))

    return show_step


def printer(style: str, *, stderr: bool = False) -> "Callable[[str, str], None]":
    """A function that prints a text in a style, then one without.

    Rich decides what the terminal supports: no colours with NO_COLOR, and plain text where the
    output is no terminal, unless FORCE_COLOR is set.
    """
    from rich.console import Console
    from rich.segment import Segment, Segments
    from rich.style import Style

    console, parsed = Console(stderr=stderr), Style.parse(style)

    def show(styled: str, plain: str) -> None:
        # crop=False: lines are not wrapped, and tabs stay tabs.
        texts = [screen_text(text, console.file) for text in (styled, plain)]
        segments = Segments([Segment(texts[0], parsed), Segment(texts[1])])
        console.print(segments, end="", crop=False)

    return show


def print_end(
    stream: "Stream", output: Output, statistics: str | None = None, *, chat: bool = False
) -> None:
    """End an answer's line, then print why it was stopped and the statistics, unless --quiet.

    `chat` is true where options are changed with /set.
    """
    print()
    if not output.quiet:
        structured = stream.request.constraint is not None
        for line in (ending(stream.result, chat=chat, structured=structured), statistics):
            if line is not None:
                say(f"[{line}]")


def short_statistics(result: "Result") -> str | None:
    """The line under an answer in a chat; None: it has no tokens."""
    stats = result.stats
    if not result.token_ids:
        return None
    if not stats.steps:
        return "1 token"
    line = f"{result.completion_tokens} tokens, {stats.decode_tokens_per_second:.1f} tokens/s"
    if stats.drafted:
        line += f", {stats.accepted} of {stats.drafted} drafts accepted"
    return line


def ending(result: "Result", *, chat: bool = False, structured: bool = False) -> str | None:
    """Return why an answer was stopped and how to continue, or None if it ended as asked."""
    if result.finish_reason == "repetition":
        option = "/set repetition_detection off" if chat else "--no-repetition-detection"
        return f"stopped: the answer repeats itself; {option} turns this off"
    if result.finish_reason != "length":
        return None
    limit, count = result.settings["max_tokens"], result.completion_tokens
    if limit.value is None or count < limit.value:
        return f"stopped after {count} tokens: the context or the key/value cache is full"
    asked = limit.source == "request" and not structured
    option = "/set max_tokens" if chat else "--max-tokens"
    return None if asked else f"stopped after {limit.value} tokens; {option} -1 removes this limit"
