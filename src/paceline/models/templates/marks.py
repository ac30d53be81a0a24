"""Marks that models were trained with: around their thoughts, and around a gap to be filled in.

The forms of published models are recognised, of thoughts by the chat template, which also turns
thinking on and off, and of gaps by the vocabulary, as llama.cpp does (llama-vocab.cpp). Filling in
the middle (FIM) has tokens for the places (Bavarian et al., 2022, arXiv 2207.14255).
`decoding/reasoning.py` splits answers.

Invariant: thoughts in an unknown form remain part of the answer.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from paceline.errors import InvalidRequest, did_you_mean
from paceline.models.templates import ChatTemplate
from paceline.models.templates.tokenizer import Tokenizer


class Form(NamedTuple):
    """How a family of models marks thoughts."""

    sign: str
    """Text that only templates of this form contain."""
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    label: str = ""
    """Text after the opening mark that is not part of the thought."""
    channels: bool = False
    """Whether the marks are harmony's, each of which is one token."""


_TAGS = Form("</think>", ("<think>",), ("</think>",))

FORMS = (
    # gpt-oss: <|channel|>analysis<|message|>...<|end|>, then the same with `final`
    Form("<|channel|>", ("<|start|>", "<|channel|>", "<|message|>"), ("<|end|>",), channels=True),
    # Gemma 4
    Form("<|channel>", ("<|channel>",), ("<channel|>",), label="thought\n"),
    # Magistral
    Form("[THINK]", ("[THINK]",), ("[/THINK]",)),
    # Seed-OSS
    Form("<seed:think>", ("<seed:think>",), ("</seed:think>",)),
    # Kimi
    Form("◁think▷", ("◁think▷",), ("◁/think▷",)),
    # Granite 3.2
    Form(
        "Here is my thought process:",
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    # Qwen3, DeepSeek R1, SmolLM3, GLM, Nemotron, LFM2.5, Granite 3.3, Hunyuan and many more
    _TAGS,
    Form("<think>", *_TAGS[1:]),
)
"""The first form whose sign is in the template is the model's."""

_WRAPS = (("<response>", "</response>"), ("<answer>", "</answer>"))
"""Marks around the answer after a thought, in Granite 3.3 and Hunyuan."""

_OFF: Mapping[str, Any] = {"enable_thinking": False, "thinking": False, "thinking_budget": 0}
"""Template variables that turn thinking off."""

_ON: Mapping[str, Any] = {"enable_thinking": True, "thinking": True}

_EFFORT = "reasoning_effort"
_SOFT = ("/no_think", "/nothink")
"""Words in a message that turn thinking off in some templates."""

_NAMES_NONE = re.compile(r"""["']none["']""")
_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message that templates read its thoughts from."""


class Thinking:
    """How one model marks thoughts, by its template and vocabulary."""

    def __init__(self, template: str | None, tokenizer: Tokenizer, model: str):
        self._template = template or ""
        self._tokenizer = tokenizer
        self._model = model

    @cached_property
    def form(self) -> Form | None:
        """The model's form; None: it has no known form."""
        if not self._template:
            return None
        form = next((form for form in FORMS if form.sign in self._template), None)
        if form is None and len(self.tokens_of(_TAGS)) == len(_TAGS.opens + _TAGS.closes):
            form = _TAGS  # the template does not mention the marks
        if form and form.channels and len(self.tokens_of(form)) < len(form.opens):
            return None
        return form

    def tokens_of(self, form: Form) -> dict[int, str]:
        """Marks that are one token: id -> mark."""
        marks = (*form.opens, *form.closes)
        tokens = {self._tokenizer.token_id(mark): mark for mark in marks}
        return {token: mark for token, mark in tokens.items() if token is not None}

    @property
    def wrap(self) -> tuple[str, str] | None:
        """Marks around the answer after a thought."""
        return next((wrap for wrap in _WRAPS if wrap[0] in self._template), None)

    def inside(self, prompt: str, bare: Callable[[], str]) -> bool:
        """Whether a prompt ends inside a thought; `bare`: without its generation prompt."""
        form = self.form
        if form is None or form.channels:
            return False
        last = max(prompt.rfind(mark) for mark in form.opens)
        if last < 0 or last < max(prompt.rfind(mark) for mark in form.closes):
            return False
        return not bare().startswith(prompt[: last + 1])

    def ends_inside(self, text: str) -> bool:
        """Whether a text, the end of a rendered prompt, ends with the mark that opens a thought."""
        form = self.form
        if form is None or form.channels:
            return False
        return text.rstrip().removesuffix(form.label.rstrip()).endswith(form.opens)

    def switch(self, on: bool) -> dict[str, Any]:
        """Template variables that turn thinking on or off.

        Raises InvalidRequest if a model that does not think is to, or a template cannot turn it
        off, and ModelError for a template that is not valid.
        """
        if variables := self._known(_ON if on else _OFF):
            return variables
        harmony = self.form is not None and self.form.channels  # low, medium or high
        named = _EFFORT in self._variables and _NAMES_NONE.search(self._template)
        if not on and named and not harmony:
            return {_EFFORT: "none"}
        if on and self.form is None:
            raise InvalidRequest(f"{self._model} does not support reasoning; omit think")
        if not on and self.form is not None:
            soft = [word for word in _SOFT if word in self._template]
            hint = f"; put {soft[0]} into a message" if soft else ""
            raise InvalidRequest(
                f"the chat template of {self._model} cannot turn thinking off{hint}"
            )
        return {}

    def effort(self, effort: str) -> dict[str, Any]:
        """Template variables for a reasoning effort.

        `none` turns thinking off; others turn it on if the template has a switch. Raises
        InvalidRequest: see `switch`.
        """
        if effort == "none":
            return self.switch(False)
        return {_EFFORT: effort, **self._known(_ON)}

    def check(self, variables: Mapping[str, Any], reserved: Collection[str]) -> None:
        """Raise InvalidRequest for a variable that the template does not read, or a reserved one.

        Clients send switches of several models at once, and turn off what a model has not.
        """
        spare = (False, True) if self._known(_OFF) else (False,) if self.form is None else ()
        known = self._variables.difference(reserved)
        for name, value in variables.items() if self._template else ():
            if name not in known and not (name in _OFF and value in spare):
                raise InvalidRequest(
                    f"the chat template of {self._model} has no variable {name[:40]!r} to set; "
                    f"{did_you_mean(name[:40], known)}leave it out"
                )

    def _known(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables that the template reads."""
        return {name: value for name, value in variables.items() if name in self._variables}

    def message_fields(self, reasoning: str | None) -> dict[str, str]:
        """Fields for the thoughts of an earlier answer, as the template reads them."""
        if not reasoning:
            return {}
        other = [name for name in _FIELDS[1:] if self._reads(name)]
        return dict.fromkeys((_FIELDS[0], *other), reasoning)

    def _reads(self, name: str) -> bool:
        pattern = rf"""\.{name}\b|\[\s*["']{name}["']\s*\]|get\(\s*["']{name}["']"""
        return re.search(pattern, self._template) is not None

    @cached_property
    def _variables(self) -> frozenset[str]:
        if not self._template:
            return frozenset()
        return ChatTemplate(self._template, model=self._model).variables


_INFILL_FORMS = (
    # Qwen2.5-Coder and Qwen3-Coder, CodeGemma
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder, Granite, StableCode
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    # Code Llama
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    # DeepSeek Coder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    # GLM 4
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    # Codestral
    ("[PREFIX]", "[SUFFIX]"),
)
"""Tokens before the prefix, before the suffix, and where the gap is filled in. Without a third one
the suffix comes first, and the answer follows the prefix."""

_INFILL_ENDS = ("<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>", "\u2581<EOT>")
"""Tokens with which some of these models end what they fill in."""


class Infill:
    """How a model is asked to fill in the middle."""

    def __init__(self, form: Sequence[str], tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        ids = map(tokenizer.token_id, form)
        self._marks = [token for token in ids if token is not None]
        ends = (name for name in _INFILL_ENDS if tokenizer.token_id(name) is not None)
        self.stops = (*form, *ends)
        """Texts that end an answer, besides the model's own end."""

    def prompt(self, prefix: Sequence[int], suffix: str) -> list[int]:
        """Token ids that ask for what is between the token ids `prefix` and a text.

        A beginning-of-sequence token stays first. Raises InvalidRequest for a suffix that is not
        valid Unicode.
        """
        bos = self._tokenizer.encode("", special=True)
        before = [*prefix]
        if before[: len(bos)] == bos:
            before = before[len(bos) :]
        after = self._tokenizer.encode(suffix)
        first, second, *middle = self._marks
        if not middle:
            return [*bos, second, *after, first, *before]
        return [*bos, first, *before, second, *after, *middle]


def infill_of(tokenizer: Tokenizer) -> Infill | None:
    """How a model is asked to fill in the middle; None if it has no tokens for it."""
    for form in _INFILL_FORMS:
        if all(tokenizer.token_id(name) is not None for name in form):
            return Infill(form, tokenizer)
    return None
