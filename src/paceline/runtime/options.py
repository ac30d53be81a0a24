"""The options of `generate` and `stream`, validated before anything runs.

The library and the command line have the same names. The ranges of values are defined where they
are used (`Sampling`, `Stopping`, the drafters); `check` makes one request of them, or one error.
"""

import difflib
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, Literal, TypedDict

from paceline.decoding.auto import Acceptance, Auto
from paceline.decoding.costs import CostTable
from paceline.decoding.policy import Adaptive, Fixed, Kelly
from paceline.decoding.reasoning import ReasoningMarks
from paceline.decoding.sampling import Sampling
from paceline.decoding.stopping import DEFAULT, Repetition, Stopping
from paceline.decoding.types import Constraint, Policy
from paceline.drafters import DrafterSpec
from paceline.engines.profile import MAX_ROWS
from paceline.errors import CacheFull, InvalidRequest, ModelError
from paceline.models import ModelFiles, settings_of
from paceline.runtime.defaults import Defaults, Setting

_RULES: Mapping[str, type[Fixed]] = {"fixed": Fixed, "adaptive": Adaptive, "kelly": Kelly}

POLICIES = ("auto", *_RULES)

MOST_LOGPROBS = 20
"""The most tokens per position in `logprobs`."""

TEMPLATE_NAMES = frozenset({"self", "messages", "tools", "add_generation_prompt"})
"""Variables of a chat template that a request may not set."""

_RULE_BLOCK = 8
"""Default block of the policies that do not weigh costs, in rows."""


class Options(TypedDict, total=False):
    """Keyword arguments of `Model.generate` and `Model.stream`; all are optional.

    From `max_tokens` to `frequency_penalty`, the default is the registry's for the model, else that
    of the model's own files, else `defaults.NEUTRAL`: greedy.
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
    `suffix:earlier`, `table[:FOLDER]`, `dflash:FOLDER`, `mtp[:FOLDER]`,
    `model:NAME`, `ahead:model:NAME`, `prediction`."""
    policy: str
    """`auto`, `fixed`, `adaptive` or `kelly`."""
    max_block: int | None
    """The most rows in a block, its first token included: 2 to 32."""
    probe: str | None
    """A drafter that is only watched: the statistics have what it would have drafted."""
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
    constraint: Constraint | None
    """The grammar of the answer; an object serves one answer."""
    prediction: Sequence[int] | None
    """Tokens of which the answer is expected to have many. They are drafted first, unless `drafter`
    is `none` or has `prediction` in another place."""


GREEDY: Options = {"generation_config": "none", "temperature": 0.0}
"""Options of measurements: greedy, without the model's own settings."""

_DRAWN_BITS = 32
"""Bits of a seed that is drawn: few, because people type it."""


@dataclass(frozen=True, slots=True)
class Request:
    """Validated options."""

    sampling: Sampling
    max_tokens: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    drafter: DrafterSpec
    policy: str
    max_block: int
    probe: DrafterSpec | None
    raw: bool
    parse_special: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: bool = False
    constraint: Constraint | None = None
    prediction: Sequence[int] = ()
    think: bool | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    thoughts: ReasoningMarks | None = None
    """How the model's reasoning is marked; None: all of the text is the answer."""
    shown: Mapping[int, str] = field(default_factory=dict)
    """Control tokens that are in the answer's text: id -> text."""
    repetition: Repetition | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """The sources of sampling settings and `max_tokens`."""

    def stopping(self, stop_token_ids: Collection[int]) -> Stopping:
        """Return when to end, for a model with these end-of-sequence tokens."""
        ends = frozenset() if self.ignore_eos else frozenset(stop_token_ids)
        return Stopping(self.max_tokens, ends, self.stop, self.min_tokens, self.repetition)

    def fitted(self, prompt: int, *, context: int, free: int) -> "Request":
        """Return the same, with `max_tokens` limited to the free KV slots.

        Args:
            prompt: tokens of its prompt.
            context: the most tokens of a sequence.
            free: KV slots that no sequence holds.

        Raises:
            CacheFull: the prompt fits into the context, but leaves no free slot for an answer.
        """
        room = min(context, free) - prompt
        if room >= 1:
            return replace(self, max_tokens=min(self.max_tokens or room, room))
        if prompt >= context:
            return self  # refused by `Generation`, with the context in the message
        raise CacheFull(
            f"the prompt has {prompt} tokens and the key/value cache has {free} free slots, for "
            "the answer too; shorten the prompt, end other streams and conversations, or load the "
            "model with more cache_tokens"
        )

    def policy_for(
        self, cost: Callable[[], CostTable], acceptance: Acceptance, context: int
    ) -> Policy:
        """Return the policy that limits drafts.

        Args:
            cost: returns seconds per call by rows; called only for `auto`.
            acceptance: the estimate of acceptance; it learns as the request runs.
            context: tokens of its prompt.
        """
        if self.drafter.none:
            return Fixed(2)  # for probes
        if self.policy == "auto":
            return Auto(self.max_block, cost(), acceptance, context)
        return _RULES[self.policy](self.max_block)


_SAMPLING = tuple(field.name for field in fields(Sampling) if field.name != "seed")
_NUMBERS = tuple(name for name in _SAMPLING if name not in ("top_k", "logit_bias"))


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_bias(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        _is_whole(token) and _is_number(bias) for token, bias in value.items()
    )


def _are_variables(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _are_strings(value: object) -> bool:
    many = [value] if isinstance(value, str) else value
    return isinstance(many, Collection) and all(isinstance(each, str) for each in many)


def _are_tokens(value: object) -> bool:
    return isinstance(value, Sequence) and all(_is_whole(each) for each in value)


_KINDS: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    **dict.fromkeys(_NUMBERS, ("a number", _is_number)),
    "top_k": ("a whole number", _is_whole),
    "max_tokens": ("a whole number or None", lambda value: value is None or _is_whole(value)),
    "seed": ("a whole number or None", lambda value: value is None or _is_whole(value)),
    "logit_bias": ("token id -> number", _is_bias),
    "stop": ("a string, or several", _are_strings),
    "generation_config": ("auto or none", lambda value: value in ("auto", "none")),
    "repetition_detection": (
        "True, False or max_pattern_size, min_pattern_size and min_count",
        lambda value: value is None or isinstance(value, bool | Mapping),
    ),
    **dict.fromkeys(
        ("ignore_eos", "raw", "parse_special", "prompt_logprobs"),
        ("True or False", lambda v: isinstance(v, bool)),
    ),
    "min_tokens": ("a whole number", _is_whole),
    "think": ("True, False or None", lambda value: value is None or isinstance(value, bool)),
    "template_kwargs": ("variable name -> value", _are_variables),
    "logprobs": (
        f"a whole number from 0 to {MOST_LOGPROBS}, or None",
        lambda value: value is None or (_is_whole(value) and value in range(MOST_LOGPROBS + 1)),
    ),
    "prediction": ("token ids or None", lambda value: value is None or _are_tokens(value)),
    "drafter": ("a string", lambda value: isinstance(value, str)),
    "probe": ("a string or None", lambda value: value is None or isinstance(value, str)),
}


def check(options: Options, defaults: Defaults | None = None) -> Request:
    """Validate `options`; `defaults` has those left out. None: greedy, without a limit.

    Raises InvalidRequest for unknown options and wrong types, a line for each; else for sampling
    settings out of their ranges, a line for each; else for the first other fault.
    """
    values: dict[str, Any] = dict(options)
    faults = []
    for name in values:
        if name not in Options.__annotations__:
            near = difflib.get_close_matches(name, Options.__annotations__, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            faults.append(f"there is no option {name!r}{hint}")
    for name, (expected, fits) in _KINDS.items():
        if name in values and not fits(values[name]):
            faults.append(f"{name} is {values[name]!r}; expected {expected}")
    if faults:
        raise InvalidRequest("\n".join(faults))
    stop = values.get("stop", ())
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    seed = values.get("seed")
    under = defaults or Defaults()
    own = values.get("generation_config", "auto") == "none"
    settings = (under.neutral() if own else under).resolve(values)
    chosen = {name: settings[name].value for name in _SAMPLING if name in settings}
    bias = {name: values[name] for name in ("logit_bias",) if name in values}
    drawn = secrets.randbits(_DRAWN_BITS) if seed is None else seed
    most = settings["max_tokens"].value
    try:
        sampling = Sampling(**chosen, **bias, seed=drawn)
        repetition = _repetition(values.get("repetition_detection"))
        Stopping(most, frozenset(), stop, values.get("min_tokens", 0))
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
    if wrong := TEMPLATE_NAMES & values.get("template_kwargs", {}).keys():
        raise InvalidRequest(f"template_kwargs cannot set {min(wrong)}")
    policy = values.get("policy", "auto")
    if policy not in POLICIES:
        raise InvalidRequest(f"policy is {policy!r}; expected {', '.join(POLICIES)}")
    block = values.get("max_block")
    if block is None:
        block = MAX_ROWS if policy == "auto" else _RULE_BLOCK
    if not _is_whole(block) or not 2 <= block <= MAX_ROWS:
        raise InvalidRequest(f"max_block is {block!r}; expected 2 to {MAX_ROWS} rows")
    drafter = DrafterSpec.parse(values.get("drafter", "auto"))
    probe = None if values.get("probe") is None else DrafterSpec.parse(values["probe"])
    for spec in (drafter, probe):
        if spec and spec.has("prediction") and not values.get("prediction"):
            raise InvalidRequest(
                f"drafter {spec} needs a prediction; say what the answer may be, or leave it out"
            )
    return Request(
        sampling=sampling,
        max_tokens=most,
        stop=stop,
        ignore_eos=values.get("ignore_eos", False),
        drafter=drafter,
        policy=policy,
        max_block=block,
        probe=probe,
        raw=values.get("raw", False),
        parse_special=values.get("parse_special", False),
        min_tokens=values.get("min_tokens", 0),
        logprobs=values.get("logprobs"),
        prompt_logprobs=values.get("prompt_logprobs", False),
        constraint=values.get("constraint"),
        prediction=values.get("prediction") or (),
        think=values.get("think"),
        template_kwargs=values.get("template_kwargs", {}),
        repetition=repetition,
        settings=settings,
    )


def defaults_of(files: ModelFiles) -> Defaults:
    """Return a model's default settings: the registry's, else those of its own files.

    Raises ModelError if its own settings cannot be used.
    """
    found = Defaults(registry=settings_of(files.name), model=files.settings)
    try:
        check({}, found)
    except InvalidRequest as error:
        raise ModelError(
            f"the settings of {files.name} cannot be used: {error}; mend generation_config.json in "
            f"{files.folder}, or go without it with --generation-config none"
        ) from error
    return found


def _repetition(value: bool | Mapping[str, Any] | None) -> Repetition | None:
    """Return the rule of `repetition_detection`; in vLLM a `max_pattern_size` of 0 is off."""
    if isinstance(value, Mapping):
        given = {"max_pattern_size": 0, "min_pattern_size": 0, "min_count": 0, **value}
        if unknown := given.keys() - {each.name for each in fields(Repetition)}:
            raise ValueError(f"repetition_detection has no {min(unknown)}")
        if given == {**given, "max_pattern_size": 0, "min_pattern_size": 0}:
            return None
        try:
            return Repetition(**given)
        except ValueError as error:
            raise ValueError(f"repetition_detection is wrong: {error}") from error
    return DEFAULT if value else None
