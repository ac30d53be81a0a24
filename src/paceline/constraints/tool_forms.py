"""The forms in which models write tool calls, and the choice of one by a chat template.

A `ToolForm` describes a form once: `call_grammar.py` makes its grammar, `tool_calls.py` its parser
and its writer. Facts are from the models' published templates and documentation. Invariant: a
template of an unknown form gets none, so that what the model writes remains text.
"""

import re
from dataclasses import dataclass
from enum import Enum, auto


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
    quote: str = '"'
    """The mark around strings in the arguments."""
    bare: bool = False
    """Whether an answer may begin with a call without its mark."""
    marks: tuple[str, ...] = ()
    """Parts of these texts that are one token in the vocabularies of such models."""
    id_length: int | None = None
    """The length of a call's id, of letters and digits, if the template demands one."""


def _signs(*patterns: str) -> tuple[re.Pattern[str], ...]:
    return tuple(map(re.compile, patterns))


HERMES = ToolForm(
    "hermes",
    _signs(r"<tool_call>"),
    mark="<tool_call>",
    lead="\n",
    before='{"name": "',
    after='", "arguments": ',
    end="}",
    close="\n</tool_call>",
    separator="\n",
    syntax=Syntax.JSON,
    marks=("<tool_call>", "</tool_call>"),
)
"""Qwen 2.5 and 3, Hermes, SmolLM; also used with templates that know no tools."""

FORMS = (HERMES,)
"""The first form whose signs are all in the template is the model's."""


def tool_form(template: str | None) -> ToolForm | None:
    """The form of a chat template; None: it has tools in no known form.

    Templates without tools get `HERMES`, which the prompt then describes.
    """
    if template is None or "tools" not in template:
        return HERMES
    return next((form for form in FORMS if all(each.search(template) for each in form.signs)), None)
