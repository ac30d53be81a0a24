"""The options of an answer, each once: its name, its type and its range.

The library, the command line and the server read them here, so that a value that one of them
rejects is rejected by all. What a caller gives is `Options`; checked, with the defaults of a model,
it is a `Request` (`runtime/request.py`). A door may have words of its own for a value, as the
command line's -1 for no limit; it translates them first.

Imports nothing that takes time: `paceline --help` reads the ranges, too.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real as RealNumber
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

from paceline.errors import did_you_mean

if TYPE_CHECKING:
    from paceline.decoding.types import Constraint

POLICIES = ("auto", "fixed", "adaptive", "kelly")

TEMPLATE_NAMES = frozenset({"self", "messages", "tools", "add_generation_prompt"})
"""Variables of a chat template that a request may not set."""

_MAX_SEED = 2**64 - 1

_SHOWN = 60
"""Characters of a wrong value that a message shows."""


class Options(TypedDict, total=False):
    """Keyword arguments of `Model.generate` and `Model.stream`; all are optional.

    From `max_tokens` to `frequency_penalty`, the default is the registry's for the model, else that
    of the model's own files, else neutral: greedy, without a limit.
    """

    max_tokens: int | None
    """Tokens in the answer; None goes on until the context or the cache is full."""
    temperature: float
    """0 is greedy."""
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    generation_config: Literal["auto", "none"]
    """`none`: options that are left out are neutral; registry and model are not read."""
    repetition_detection: bool | Mapping[str, int] | None
    """End an answer that repeats itself: True for the rule of `paceline generate`, or a rule as in
    vLLM: `max_pattern_size`, `min_pattern_size`, `min_count`."""
    logit_bias: Mapping[int, float]
    seed: int | None
    """0 to 2**64 - 1; None draws one, which the result has."""
    stop: str | Collection[str]
    """Strings that end the answer; the text ends before them."""
    ignore_eos: bool
    """Go on after end-of-sequence tokens."""
    drafter: str
    """`auto`, `none`, or parts joined by +: `ngram:min=2,max=4,length=15`, `suffix`,
    `suffix:earlier`, `table[:FOLDER]`, `model:NAME`, `prediction`, heads, `KIND[:FOLDER]`, and
    `ahead:model:NAME` or `ahead:dflash:FOLDER`."""
    policy: str
    """`auto`, `fixed`, `adaptive` or `kelly`."""
    max_block: int | None
    """The most rows in a block, its first token included: 2 to 32."""
    probe: str | None
    """A drafter that is only watched: the statistics have what it would have drafted."""
    system: str | None
    """The system message, before a string or before messages that have none."""
    raw: bool
    """Use a string as it is, without the chat template."""
    parse_special: bool
    """True: names of control tokens in messages become the tokens, as in other runtimes. They do so
    in a `raw` prompt anyway."""
    think: bool | None
    """False turns the model's thinking off, True on, through its chat template; None (the default)
    leaves it to the template."""
    template_kwargs: Mapping[str, Any]
    """Variables for the chat template, such as `reasoning_effort`."""
    min_tokens: int
    """Tokens that come before an end-of-sequence token or a repetition may end the answer."""
    logprobs: int | None
    """Return the logprob of each token of the answer, and of this many likeliest ones: 0 to 20."""
    prompt_logprobs: bool
    """Return the same for the prompt, which is then computed whole."""
    json_schema: Mapping[str, Any] | str | type | None
    """The answer is JSON, on one line, that matches this schema, JSON text or class of pydantic."""
    regex: str | None
    """The answer matches this regular expression (Rust's, no look-around)."""
    grammar: str | None
    """The answer matches the rule `start` of this grammar, in llguidance's Lark syntax, or `root`
    in llama.cpp's GBNF."""
    constraint: "Constraint | None"
    """A compiled grammar of the answer; an object serves one answer."""
    prediction: Sequence[int] | None
    """Tokens of which the answer is expected to have many. They are drafted first, unless `drafter`
    is `none` or has `prediction` in another place."""


GREEDY: Options = {"generation_config": "none", "temperature": 0.0}
"""Options of measurements: greedy, without the model's own settings."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number from `min_value` to `max_value`; None: without an upper limit."""

    min_value: int
    max_value: int | None = None

    def allows(self, value: object) -> bool:
        if not isinstance(value, int) or isinstance(value, bool):
            return False
        return self.min_value <= value and (self.max_value is None or value <= self.max_value)

    def __str__(self) -> str:
        if self.max_value is None:
            return f"a whole number of {self.min_value} or more"
        max_value = "2**64 - 1" if self.max_value == _MAX_SEED else self.max_value
        return f"a whole number from {self.min_value} to {max_value}"


@dataclass(frozen=True, slots=True)
class Real:
    """A finite number from `min_value` to `max_value`, or above `min_value`."""

    min_value: float
    max_value: float
    open: bool = False
    """Whether `min_value` itself is excluded."""

    def allows(self, value: object) -> bool:
        if not isinstance(value, RealNumber) or isinstance(value, bool):
            return False
        number: Any = value  # not made a float, which a whole number of 400 digits cannot be
        return bool(self.min_value <= number <= self.max_value) and not (
            self.open and number == self.min_value
        )

    def __str__(self) -> str:
        if self.open:
            return f"a number above {self.min_value:g}, up to {self.max_value:g}"
        return f"a number from {self.min_value:g} to {self.max_value:g}"


RANGES: Mapping[str, Whole | Real] = {
    "max_tokens": Whole(1),
    "temperature": Real(0, 100),
    "top_k": Whole(0),
    "top_p": Real(0, 1, open=True),
    "min_p": Real(0, 1),
    "repetition_penalty": Real(0, 100, open=True),
    "presence_penalty": Real(-100, 100),
    "frequency_penalty": Real(-100, 100),
    "seed": Whole(0, _MAX_SEED),
    "max_block": Whole(2, 32),
    "min_tokens": Whole(0),
    "logprobs": Whole(0, 20),
}
"""Option -> its range, of the options that are one number."""

BIAS_TOKEN, BIAS = Whole(0), Real(-1e6, 1e6)
"""The ranges of a token and its bias in `logit_bias`."""

STRUCTURES = ("json_schema", "regex", "grammar")
"""Options that give the answer a structure, of which an answer has one at most."""

_OR_NONE = (
    *("max_tokens", "seed", "max_block", "logprobs", "think", "probe", "prediction", "system"),
    *(*STRUCTURES, "constraint"),
)


class _Kind(NamedTuple):
    expected: str
    allows: Callable[[Any], bool]


_FLAG = _Kind("True or False", lambda value: isinstance(value, bool))
_TEXT = _Kind("a string", lambda value: isinstance(value, str))


def schema_of(value: Any) -> Mapping[str, Any] | None:
    """Return the JSON schema in a value of `json_schema`, or None if there is none."""
    with suppress(Exception):  # of a class whose fields have none, or a text that is not JSON
        if isinstance(value, str):
            value = json.loads(value)
        elif hasattr(value, "model_json_schema"):
            value = value.model_json_schema()
    return value if isinstance(value, Mapping) else None


def _strings(value: object) -> bool:
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, Collection) and all(isinstance(text, str) and text for text in texts)


_KINDS: Mapping[str, _Kind] = {
    **{name: _Kind(str(limits), limits.allows) for name, limits in RANGES.items()},
    **dict.fromkeys(("ignore_eos", "raw", "parse_special", "prompt_logprobs", "think"), _FLAG),
    **dict.fromkeys(("drafter", "probe"), _TEXT),
    **dict.fromkeys(
        ("system", "regex", "grammar"),
        _Kind("a string that is not empty", lambda value: isinstance(value, str) and bool(value)),
    ),
    "json_schema": _Kind(
        'a JSON schema, such as {"type": "object"}, as text too, or a class of pydantic',
        lambda value: schema_of(value) is not None,
    ),
    "policy": _Kind(
        ", ".join(POLICIES), lambda value: isinstance(value, str) and value in POLICIES
    ),
    "generation_config": _Kind("auto or none", lambda value: value in ("auto", "none")),
    "stop": _Kind("a string of one or more characters, or several", _strings),
    "repetition_detection": _Kind(
        "True, False or max_pattern_size, min_pattern_size and min_count",
        lambda value: value is None or isinstance(value, bool | Mapping),
    ),
    "logit_bias": _Kind(f"token id -> {BIAS}", lambda value: isinstance(value, Mapping)),
    "constraint": _Kind("a compiled grammar", lambda _: True),
    "template_kwargs": _Kind(
        "variable name -> value",
        lambda value: (
            isinstance(value, Mapping) and all(isinstance(variable, str) for variable in value)
        ),
    ),
    "prediction": _Kind(
        "token ids",
        lambda value: (
            isinstance(value, Sequence)
            and all(isinstance(token, int) and not isinstance(token, bool) for token in value)
        ),
    ),
}


def described() -> str:
    """Return a line for each option: its name, its type and its range."""
    return "\n".join(f"    {name}: {_expected(name)}" for name in Options.__annotations__)


def _expected(name: str) -> str:
    return f"{_KINDS[name].expected}{', or None' * (name in _OR_NONE)}"


def faults(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with options, a line each: unknown names, wrong types, values out of range.

    The syntax of `drafter` and `probe`, and the parts of `repetition_detection`, are checked where
    they are parsed.
    """
    return [*_unknown(values), *_wrong(values), *_contradictory(values)]


def _unknown(values: Mapping[str, Any]) -> Iterator[str]:
    known = Options.__annotations__
    for name in values:
        if name not in known:
            yield f"there is no option {name!r}; {did_you_mean(name, known)}".rstrip("; ")


def _wrong(values: Mapping[str, Any]) -> Iterator[str]:
    for name, (_, allows) in _KINDS.items():
        if name not in values or (values[name] is None and name in _OR_NONE):
            continue
        if not allows(values[name]):
            yield f"{name} is {_shown(values[name])}; expected {_expected(name)}"
        elif name == "template_kwargs" and (reserved := TEMPLATE_NAMES & values[name].keys()):
            yield f"template_kwargs cannot set {min(reserved)}"
    biases = values.get("logit_bias")
    for token, bias in biases.items() if isinstance(biases, Mapping) else ():
        if not (BIAS_TOKEN.allows(token) and BIAS.allows(bias)):
            yield f"logit_bias is {_shown({token: bias})}; expected token id -> {BIAS}"
            break


def _contradictory(values: Mapping[str, Any]) -> Iterator[str]:
    names = [name for name in (*STRUCTURES, "constraint") if values.get(name) is not None]
    if len(names) > 1:
        yield f"{' and '.join(names)} cannot be combined; give one of them"
    if names and names[0] != "constraint" and values.get("ignore_eos"):
        yield f"ignore_eos cannot be combined with {names[0]}: the answer ends with its structure"


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        text = f"a value that cannot be shown ({type(value).__name__})"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
