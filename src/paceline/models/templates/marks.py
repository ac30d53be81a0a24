"""Tags that models were trained with: around their reasoning, and around a gap to fill in.

The formats of published models are recognized: reasoning by the chat template, which also turns
it on and off, and gaps by the vocabulary, as in llama.cpp (llama-vocab.cpp). Filling in
the middle (FIM) has tokens for the places (Bavarian et al., 2022, arXiv 2207.14255).
`decoding/reasoning.py` splits answers.

Invariant: reasoning in an unknown format remains part of the answer.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from paceline.errors import InvalidRequest, did_you_mean
from paceline.models.templates import ChatTemplate
from paceline.models.templates.tokenizer import Tokenizer


class Form(NamedTuple):
    """A reasoning format of a model family."""

    sign: str
    """Text that only templates with this format contain."""
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    label: str = ""
    """Text after the opening tag that is not part of the reasoning."""
    channels: bool = False
    """True if the tags are harmony's; each is one token."""


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
"""A model has the first format whose sign is in its template."""

_WRAPS = (("<response>", "</response>"), ("<answer>", "</answer>"))
"""Tags around the answer after the reasoning, in Granite 3.3 and Hunyuan."""

_OFF: Mapping[str, Any] = {"enable_thinking": False, "thinking": False, "thinking_budget": 0}

_ON: Mapping[str, Any] = {"enable_thinking": True, "thinking": True}

_EFFORT = "reasoning_effort"
_SOFT = ("/no_think", "/nothink")
"""Words in a message that turn reasoning off in some templates."""

_NAMES_NONE = re.compile(r"""["']none["']""")
_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message that templates read its reasoning from."""


class Thinking:
    """A model's reasoning format, from its template and vocabulary."""

    def __init__(self, template: str | None, tokenizer: Tokenizer, model: str):
        self._template = template or ""
        self._tokenizer = tokenizer
        self._model = model

    @cached_property
    def form(self) -> Form | None:
        """The model's format, or None if it is unknown."""
        if not self._template:
            return None
        form = next((form for form in FORMS if form.sign in self._template), None)
        if form is None and len(self.tokens_of(_TAGS)) == len(_TAGS.opens + _TAGS.closes):
            form = _TAGS  # the template does not mention the tags
        if form and form.channels and len(self.tokens_of(form)) < len(form.opens):
            return None
        return form

    def tokens_of(self, form: Form) -> dict[int, str]:
        """Return the tags that are one token: id -> tag."""
        marks = (*form.opens, *form.closes)
        tokens = {self._tokenizer.token_id(mark): mark for mark in marks}
        return {token: mark for token, mark in tokens.items() if token is not None}

    @property
    def wrap(self) -> tuple[str, str] | None:
        """Tags around the answer after the reasoning."""
        return next((wrap for wrap in _WRAPS if wrap[0] in self._template), None)

    def ends_in_reasoning(self, prompt: str, bare: Callable[[], str]) -> bool:
        """Return whether a prompt ends inside reasoning; `bare`: without its generation prompt."""
        form = self.form
        if form is None or form.channels:
            return False
        last = max(prompt.rfind(mark) for mark in form.opens)
        if last < 0 or last < max(prompt.rfind(mark) for mark in form.closes):
            return False
        return not bare().startswith(prompt[: last + 1])

    def ends_inside(self, text: str) -> bool:
        """Return whether the end of a rendered prompt is an opening reasoning tag."""
        form = self.form
        if form is None or form.channels:
            return False
        return text.rstrip().removesuffix(form.label.rstrip()).endswith(form.opens)

    def switch(self, on: bool) -> dict[str, Any]:
        """Return template variables that turn reasoning on or off.

        Raises InvalidRequest if the model does not reason, or the template cannot turn it off, and
        ModelError for an invalid template.
        """
        if variables := self._variables_of(_ON if on else _OFF):
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
                f"the chat template of {self._model} cannot turn reasoning off{hint}"
            )
        return {}

    def effort(self, effort: str) -> dict[str, Any]:
        """Return template variables for a reasoning effort.

        `none` turns reasoning off; others turn it on if the template has a switch. Raises
        InvalidRequest like `switch`.
        """
        if effort == "none":
            return self.switch(False)
        return {_EFFORT: effort, **self._variables_of(_ON)}

    def check(self, variables: Mapping[str, Any], reserved: Collection[str]) -> None:
        """Raise InvalidRequest for a variable that the template does not read, or a reserved one.

        Clients send switches of several models at once, and turn off unsupported features.
        """
        spare = (False, True) if self._variables_of(_OFF) else (False,) if self.form is None else ()
        known = self._variables.difference(reserved)
        for name, value in variables.items() if self._template else ():
            if name not in known and not (name in _OFF and value in spare):
                raise InvalidRequest(
                    f"the chat template of {self._model} has no variable {name[:40]!r} to set; "
                    f"{did_you_mean(name[:40], known)}remove it"
                )

    def _variables_of(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in variables.items() if name in self._variables}

    def message_fields(self, reasoning: str | None) -> dict[str, str]:
        """Return fields for the reasoning of an earlier answer, as the template reads them."""
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
"""Tokens that some of these models write at the end of the filled-in text."""


class Infill:
    """A model's prompt format for filling in the middle."""

    def __init__(self, form: Sequence[str], tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        ids = map(tokenizer.token_id, form)
        self._marks = [token for token in ids if token is not None]
        ends = (name for name in _INFILL_ENDS if tokenizer.token_id(name) is not None)
        self.stops = (*form, *ends)
        """Texts that end an answer, in addition to the model's own end."""

    def prompt(self, prefix: Sequence[int], suffix: str) -> list[int]:
        """Return token ids that request the text between the token ids `prefix` and a text.

        A beginning-of-sequence token stays first. Raises InvalidRequest if the suffix is not valid
        Unicode.
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
    """Return a model's format for filling in the middle, or None if it lacks the tokens."""
    for form in _INFILL_FORMS:
        if all(tokenizer.token_id(name) is not None for name in form):
            return Infill(form, tokenizer)
    return None
