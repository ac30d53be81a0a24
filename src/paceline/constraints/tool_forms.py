"""The forms in which models write tool calls, and the choice of one by a chat template.

A `ToolForm` describes a form once: `call_grammar.py` makes its grammar, `tool_calls.py` its parser
and its writer. Facts are from the models' published templates and documentation. Invariant: a
template of an unknown form gets none, so that what the model writes remains text.
"""

import re
from dataclasses import dataclass, replace
from enum import Enum, auto

from paceline.decoding.text import SIGN


class Syntax(Enum):
    """How arguments are written."""

    JSON = auto()
    """{"city": "Paris"}"""
    XML = auto()
    """<parameter=city>, the value, and </parameter>, each on a line of its own."""
    PYTHON = auto()
    """city="Paris", days=[1, 2]: keyword arguments of a Python call"""
    BRACES = auto()
    """{city:<|"|>Paris<|"|>,days:[1,2]}: bare keys, and strings between marks"""


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a family of models writes calls.

    A call is `before`, the function's name, `after`, the arguments, `end`. A group is `mark`,
    `lead`, its calls with `between` in between, and `close`; an answer has groups with `separator`
    in between.
    """

    name: str
    signs: tuple[re.Pattern[str], ...]
    """All of them are in templates of this form."""
    mark: str
    """Begins a group."""
    lead: str
    """Text between the mark and the first call."""
    before: str
    after: str
    end: str
    close: str
    syntax: Syntax
    between: str | None = None
    """None: a group has one call."""
    separator: str = ""
    quote: str = ""
    """The mark around strings, in the syntax BRACES."""
    optional: tuple[str, ...] = ()
    """Parts at the beginning of `after` that a model may leave out."""
    bare: bool = False
    """Whether a call is at the beginning of an answer, and needs no mark."""
    single: bool = False
    """Whether the templates allow one call in an answer."""
    channels: bool = False
    """Whether the mark also begins other messages (harmony)."""
    tokens: tuple[str, ...] = ()
    """Parts of these texts that are one token in the vocabularies of such models."""
    id_length: int | None = None
    """The length of a call's id, of letters and digits, if the templates demand one."""

    @property
    def as_object(self) -> bool:
        """Whether a call is a JSON object."""
        return self.before.startswith("{")

    def signed(self) -> "ToolForm":
        """The form in texts with a sign before each mark: the same letters without it are text."""
        return replace(self, mark=SIGN + self.mark)


NAME = re.compile(r"[\w.:/\-]*")
"""A function's name where a call is no JSON object."""


def _signs(*patterns: str) -> tuple[re.Pattern[str], ...]:
    return tuple(map(re.compile, patterns))


HERMES = ToolForm(
    "hermes",
    _signs(r"<tool_call>", r'"arguments\\?"'),
    mark="<tool_call>",
    lead="\n",
    before='{"name": "',
    after='", "arguments": ',
    end="}",
    close="\n</tool_call>",
    separator="\n",
    syntax=Syntax.JSON,
    tokens=("<tool_call>", "</tool_call>"),
)
"""Qwen 2.5 and 3, Hermes, SmolLM, Granite 4; also for templates that know no tools."""

QWEN_XML = ToolForm(
    "qwen-xml",
    _signs(r"<tool_call>", r"<function="),
    mark="<tool_call>",
    lead="\n",
    before="<function=",
    after=">\n",
    end="</function>",
    close="\n</tool_call>",
    separator="\n",
    syntax=Syntax.XML,
    tokens=("<tool_call>", "</tool_call>"),
)
"""Qwen3-Coder, Qwen 3.5, Nemotron 3 Nano, Step 3.5."""

LLAMA = ToolForm(
    "llama",
    _signs(r"<\|start_header_id\|>", r'"parameters\\?": '),
    mark="<|python_tag|>",
    lead="",
    before='{"name": "',
    after='", "parameters": ',
    end="}",
    close="",
    syntax=Syntax.JSON,
    bare=True,
    single=True,
    tokens=("<|python_tag|>",),
)
"""Llama 3.1 to 3.3. Calls of its built-in tools, which are Python code, remain text."""

MISTRAL = ToolForm(
    "mistral",
    _signs(r"\[TOOL_CALLS\]"),
    mark="[TOOL_CALLS]",
    lead="[",
    before='{"name": "',
    after='", "arguments": ',
    end="}",
    between=", ",
    close="]",
    syntax=Syntax.JSON,
    tokens=("[TOOL_CALLS]",),
    id_length=9,
)
"""Mistral's tokenizers up to version 7; their templates demand ids of 9 letters and digits."""

MISTRAL_ARGS = replace(
    MISTRAL,
    name="mistral-args",
    signs=_signs(r"\[TOOL_CALLS\]", r"\[ARGS\]"),
    lead="",
    before="",
    after="[ARGS]",
    optional=("[ARGS]",),
    end="",
    between=None,
    close="",
    tokens=("[TOOL_CALLS]", "[ARGS]"),
)
"""Mistral's tokenizers from version 13 on: Devstral, Ministral 3. Version 11 has no `[ARGS]`."""

GEMMA = ToolForm(
    "gemma",
    _signs(r"<\|tool_call>call:"),
    mark="<|tool_call>",
    lead="",
    before="call:",
    after="",
    end="",
    close="<tool_call|>",
    syntax=Syntax.BRACES,
    quote='<|"|>',
    tokens=("<|tool_call>", "<tool_call|>", '<|"|>'),
)
"""Gemma 4."""

FUNCTION_GEMMA = replace(
    GEMMA,
    name="function-gemma",
    signs=_signs(r"<start_function_call>call:"),
    mark="<start_function_call>",
    close="<end_function_call>",
    quote="<escape>",
    tokens=("<start_function_call>", "<end_function_call>", "<escape>"),
)

LFM2 = ToolForm(
    "lfm2",
    _signs(r"<\|tool_(call|list)_start\|>|List of tools: "),
    mark="<|tool_call_start|>",
    lead="[",
    before="",
    after="(",
    end=")",
    between=", ",
    close="]<|tool_call_end|>",
    syntax=Syntax.PYTHON,
    tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
)

HARMONY = ToolForm(
    "harmony",
    _signs(r"<\|channel\|>", r" to=", r"functions\."),
    mark="<|channel|>",
    lead="",
    before="commentary to=functions.",
    after=" <|constrain|>json<|message|>",
    optional=("<|constrain|>", "json"),
    end="",
    close="<|call|>",
    separator="<|start|>assistant",
    syntax=Syntax.JSON,
    channels=True,
    single=True,
    tokens=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"),
)
"""gpt-oss. `decoding/reasoning.py` brings the head of a message into this order. A call ends an
answer, because `<|call|>` is a stop token."""

FORMS = (HARMONY, GEMMA, FUNCTION_GEMMA, LFM2, MISTRAL_ARGS, MISTRAL, QWEN_XML, HERMES, LLAMA)
"""The first form whose signs are all in the template is the model's."""


def tool_form(template: str | None) -> ToolForm | None:
    """The form of a chat template; None: it has tools in no known form.

    Templates without tools get `HERMES`, which the prompt then describes.
    """
    if template is None or "tools" not in template:
        return HERMES
    return next((form for form in FORMS if all(each.search(template) for each in form.signs)), None)
