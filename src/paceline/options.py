"""The options of an answer, each declared once: its type, its values and its help.

`Options` is the declaration. The checks, Python's help, the command line, `/set` in a chat and the
server read it, so that a value that one of them rejects is rejected by all. What a caller gives is
`Options`; checked, with the defaults of a model, it is a `Request` (`runtime/request.py`). An
interface may write a value in its own way, as the command line's -1 for no limit; it translates
that first.

Imports nothing that takes time: `paceline --help` also reads this.
"""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypedDict

from paceline.errors import did_you_mean

if TYPE_CHECKING:
    from paceline.decoding.types import Constraint

POLICIES = ("auto", "fixed", "adaptive", "kelly")

TEMPLATE_NAMES = frozenset({"self", "messages", "tools", "add_generation_prompt"})
"""Variables of a chat template that a request may not set."""

_SHOWN = 60
"""Characters of a wrong value that a message shows."""

_LONG_BITS = 31
"""Bits of the smallest limit that a message writes as a power of two."""


@dataclass(frozen=True, slots=True)
class Range:
    """Finite numbers from `min_value` to `max_value`; None: without an upper limit."""

    type: type[int] | type[float]
    min_value: float
    max_value: float | None = None
    open: bool = False
    """Whether `min_value` itself is excluded."""

    def allows(self, value: object) -> bool:
        kind = int if self.type is int else Real
        if not isinstance(value, kind) or isinstance(value, bool):
            return False
        number: Any = value  # not made a float, which a whole number of 400 digits cannot be
        is_above = number > self.min_value if self.open else number >= self.min_value
        return bool(is_above and (self.max_value is None or number <= self.max_value))

    def __call__(self, text: str) -> Any:
        """Return the number that a text is. Raises ValueError if it is not in the range."""
        try:
            value = self.type(text)
        except ValueError:  # also for more digits than Python reads
            value = math.nan
        if not self.allows(value):
            raise ValueError(f"{shorten(text)} is not {self}")
        return value

    def __str__(self) -> str:
        number = "a whole number" if self.type is int else "a number"
        low = f"{self.min_value:.12g}"
        if self.max_value is None:
            return f"{number} of {low} or more"
        bits = int(self.max_value).bit_length()
        is_long = bits >= _LONG_BITS and self.max_value == 2**bits - 1
        high = f"2**{bits} - 1" if is_long else f"{self.max_value:.12g}"
        between = f"above {low}, up to" if self.open else f"from {low} to"
        return f"{number} {between} {high}"


IntRange, FloatRange = partial(Range, int), partial(Range, float)
COUNT = IntRange(1, 2**31 - 1)


def shorten(value: object) -> str:
    """Return a value for a message, without its end if that is long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        text = f"a value that cannot be shown ({type(value).__name__})"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


class Kind(NamedTuple):
    """Values that are not one number in a range."""

    expected: str
    allows: Callable[[Any], bool]

    def __str__(self) -> str:
        return self.expected


def schema_of(value: Any) -> Mapping[str, Any] | None:
    """Return the JSON schema in a value of `json_schema`, or None if there is none."""
    with suppress(Exception):  # of a class whose fields have none, or a text that is not JSON
        if isinstance(value, str):
            value = json.loads(value)
        elif hasattr(value, "model_json_schema"):
            value = value.model_json_schema()
    return value if isinstance(value, Mapping) else None


def _is_strings(value: object) -> bool:
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, Collection) and all(isinstance(text, str) and text for text in texts)


_FLAG = Kind("True or False", lambda value: isinstance(value, bool))
_TEXT = Kind("a string", lambda value: isinstance(value, str))
_NOT_EMPTY = Kind(
    "a string that is not empty", lambda value: isinstance(value, str) and value != ""
)
_LAYERS = Kind("auto or none", lambda value: value in ("auto", "none"))
_POLICY = Kind(", ".join(POLICIES), lambda value: isinstance(value, str) and value in POLICIES)
_RULE = Kind(
    "True, False or max_pattern_size, min_pattern_size and min_count",
    lambda value: value is None or isinstance(value, bool | Mapping),
)
_SCHEMA = Kind(
    'a JSON schema, such as {"type": "object"}, as text too, or a class of pydantic',
    lambda value: schema_of(value) is not None,
)
_GRAMMAR = Kind("a compiled grammar", lambda _: True)
_STRINGS = Kind("a string of one or more characters, or several", _is_strings)
_TOKENS = Kind(
    "token ids",
    lambda value: isinstance(value, Sequence) and all(type(token) is int for token in value),
)
_VARIABLES = Kind(
    "variable name -> value",
    lambda value: isinstance(value, Mapping) and all(isinstance(name, str) for name in value),
)
BIAS_TOKEN, BIAS = IntRange(0), FloatRange(-1e6, 1e6)
"""The ranges of a token and its bias in `logit_bias`."""

_BIASES = Kind(f"token id -> {BIAS}", lambda value: isinstance(value, Mapping))


class About(NamedTuple):
    """The command line's form of an option: section, help, words."""

    panel: str
    """The section of the command line's help; empty: it is not on the command line."""
    help: str
    words: str = ""
    """Its words on the command line; empty: its name, with two dashes."""
    metavar: str | None = None


_answer, _drafting = partial(About, "Answer"), partial(About, "Speculation")
_sampling = partial(About, "Sampling (default: as the model has it)")
_python = partial(About, "")


class Options(TypedDict, total=False):
    """Keyword arguments of `Model.generate` and `Model.stream`; all are optional.

    From `max_tokens` to `frequency_penalty`, the default is the registry's for the model, else that
    of the model's own files, else neutral: greedy, without a limit.
    """

    max_tokens: Annotated[
        int | None, IntRange(1), _answer("maximum tokens of an answer", "-n --max-tokens")
    ]
    """None: until the context or the cache is full."""
    temperature: Annotated[
        float,
        FloatRange(0, 100),
        _sampling("sampling temperature; 0 always takes the most likely token", "-t --temperature"),
    ]
    top_k: Annotated[int, IntRange(0), _sampling("keep the k most likely tokens")]
    top_p: Annotated[
        float,
        FloatRange(0, 1, open=True),
        _sampling("keep the most likely tokens up to this total probability"),
    ]
    min_p: Annotated[
        float, FloatRange(0, 1), _sampling("minimum probability, relative to the most likely token")
    ]
    repetition_penalty: Annotated[
        float,
        FloatRange(0, 100, open=True),
        _sampling("divide the logits of tokens in the context"),
    ]
    presence_penalty: Annotated[
        float, FloatRange(-100, 100), _sampling("subtract from the logits of tokens in the answer")
    ]
    frequency_penalty: Annotated[
        float, FloatRange(-100, 100), _sampling("subtract for each occurrence in the answer")
    ]
    seed: Annotated[
        int | None, IntRange(0, 2**64 - 1), _sampling("the same seed gives the same tokens")
    ]
    """None draws one, which the result has."""
    logit_bias: Annotated[
        Mapping[int, float], _BIASES, _sampling("add to a token's logit", metavar="TOKEN=BIAS")
    ]
    generation_config: Annotated[
        Literal["auto", "none"],
        _LAYERS,
        _sampling("none: ignore the model's own sampling settings"),
    ]
    repetition_detection: Annotated[
        bool | Mapping[str, int] | None,
        _RULE,
        _answer(
            "stop an output that repeats itself", "--repetition-detection/--no-repetition-detection"
        ),
    ]
    """True for the rule of `paceline generate`, or a rule as in vLLM."""
    stop: Annotated[str | Collection[str], _STRINGS, _answer("a string that ends the answer")]
    """The text ends before it."""
    json_schema: Annotated[
        Mapping[str, Any] | str | type | None,
        _SCHEMA,
        _answer("answer in JSON that matches this schema", "--schema", "FILE|JSON"),
    ]
    regex: Annotated[
        str | None, _NOT_EMPTY, _answer("answer with a match of this regular expression")
    ]
    """Rust's, no look-around."""
    grammar: Annotated[
        str | None,
        _NOT_EMPTY,
        _answer("answer in this grammar, in llguidance's Lark or GBNF", metavar="FILE"),
    ]
    """Its rule `start` in Lark, `root` in GBNF."""
    constraint: Annotated[
        "Constraint | None", _GRAMMAR, _python("a compiled grammar of one answer")
    ]
    ignore_eos: Annotated[bool, _FLAG, _answer("continue after the end-of-sequence token")]
    min_tokens: Annotated[
        int,
        IntRange(0),
        _python("minimum tokens before an end token or a repetition ends the answer"),
    ]
    parse_special: Annotated[
        bool, _FLAG, _answer("read names of special tokens in messages as the tokens")
    ]
    """They do so in a `raw` prompt anyway."""
    think: Annotated[
        bool | None,
        _FLAG,
        _answer(
            "turn reasoning on or off; default: from the chat template",
            "--think/--no-think",
        ),
    ]
    template_kwargs: Annotated[
        Mapping[str, Any],
        _VARIABLES,
        _answer("variables for the chat template, as an object", "--chat-template-kwargs", "JSON"),
    ]
    drafter: Annotated[
        str,
        _TEXT,
        _drafting(
            "drafter that proposes tokens for the model to verify: auto, none, or several joined "
            "by +; never changes the output"
        ),
    ]
    """The parts are `ngram:min=2,max=4,length=15`, `suffix`, `suffix:earlier`, `table[:FOLDER]`,
    `model:NAME`, `prediction`, heads, `KIND[:FOLDER]`, and `ahead:` before a model or `dflash`."""
    policy: Annotated[
        str,
        _POLICY,
        _drafting("how many tokens to draft: auto (by measured costs), fixed, adaptive or kelly"),
    ]
    max_block: Annotated[
        int | None,
        IntRange(2, 32),
        _drafting("maximum tokens that one forward pass verifies, 2 to 32"),
    ]
    probe: Annotated[
        str | None,
        _TEXT,
        _drafting(
            "also count the tokens that another drafter would have had accepted", "", "DRAFTER"
        ),
    ]
    prediction: Annotated[
        Sequence[int] | None,
        _TOKENS,
        _python("tokens that the answer is expected to share"),
    ]
    """They are drafted first, unless `drafter` is `none` or has `prediction` in another place."""
    system: Annotated[str | None, _NOT_EMPTY, About("Options", "system message", "-s --system")]
    """Before a string, or before messages that have none."""
    raw: Annotated[bool, _FLAG, _python("no chat template")]
    logprobs: Annotated[
        int | None,
        IntRange(0, 20),
        _python("return logprobs of the tokens, and of this many alternatives"),
    ]
    prompt_logprobs: Annotated[
        bool, _FLAG, _python("return logprobs of the prompt, which is then computed whole")
    ]


class Option(NamedTuple):
    """The declaration of an option, from its annotation."""

    type: Any
    values: Range | Kind
    about: About

    @property
    def is_optional(self) -> bool:
        return "None" in str(self.type)

    @property
    def is_switch(self) -> bool:
        """True if it may be true or false."""
        return "bool" in str(self.type)

    @property
    def expected(self) -> str:
        return f"{self.values}{', or None' * self.is_optional}"


OPTIONS: Mapping[str, Option] = {
    name: Option(hint.__origin__, *hint.__metadata__)
    for name, hint in Options.__annotations__.items()
}

RANGES: Mapping[str, Range] = {
    name: option.values for name, option in OPTIONS.items() if isinstance(option.values, Range)
}
"""Option -> its range, of the options that are one number."""

GREEDY: Options = {"generation_config": "none", "temperature": 0.0}
"""Options of measurements: greedy, without the model's own settings."""

STRUCTURES = ("json_schema", "regex", "grammar")
"""Options that give the answer a structure; an answer has at most one."""


def described() -> str:
    """Return a line for each option: its name, its help and its values."""
    lines = (f"    {name}: {one.about.help}; {one.expected}" for name, one in OPTIONS.items())
    return "\n".join(lines)


def faults(values: Mapping[str, Any]) -> list[str]:
    """Return the faults of options, one line each: names, types, values out of range.

    The syntax of `drafter` and `probe`, and the parts of `repetition_detection`, are checked where
    they are parsed.
    """
    return [*_unknown(values), *_wrong(values), *_contradictory(values)]


def _unknown(values: Mapping[str, Any]) -> Iterator[str]:
    for name in values:
        if name not in OPTIONS:
            yield f"unknown option {name!r}; {did_you_mean(name, OPTIONS)}".rstrip("; ")


def _wrong(values: Mapping[str, Any]) -> Iterator[str]:
    for name, option in OPTIONS.items():
        if name not in values or (values[name] is None and option.is_optional):
            continue
        if not option.values.allows(values[name]):
            yield f"{name} is {shorten(values[name])}; expected {option.expected}"
        elif name == "template_kwargs" and (reserved := TEMPLATE_NAMES & values[name].keys()):
            yield f"template_kwargs cannot set {min(reserved)}"
    biases = values.get("logit_bias")
    for token, bias in biases.items() if isinstance(biases, Mapping) else ():
        if not (BIAS_TOKEN.allows(token) and BIAS.allows(bias)):
            yield f"logit_bias is {shorten({token: bias})}; expected token id -> {BIAS}"
            break


def _contradictory(values: Mapping[str, Any]) -> Iterator[str]:
    names = [name for name in (*STRUCTURES, "constraint") if values.get(name) is not None]
    if len(names) > 1:
        yield f"{' and '.join(names)} cannot be combined; give one of them"
    if names and names[0] != "constraint" and values.get("ignore_eos"):
        yield f"ignore_eos cannot be combined with {names[0]}: the answer ends with its structure"
