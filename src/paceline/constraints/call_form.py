"""What a form of tool calls is: a `ToolForm`, of which `tool_forms.py` has a table.

`call_grammar.py` makes a form's grammar, `tool_calls.py` its parser and its writer.
"""

import re
from dataclasses import dataclass, replace
from enum import Enum, auto

from paceline.decoding.text import SIGN


class Syntax(Enum):
    """How arguments are written."""

    JSON = auto()
    """{"city": "Paris"}"""
    TAGS = auto()
    """<parameter=city>Paris</parameter>: values between tags, strings as they are"""
    PYTHON = auto()
    """city="Paris", days=[1, 2]: keyword arguments of a Python call"""
    BRACES = auto()
    """{city:<|"|>Paris<|"|>,days:[1,2]}: bare keys, and strings between marks"""


@dataclass(frozen=True, slots=True)
class Tags:
    """How the syntax TAGS writes an argument: `open`, its name, `middle`, its value, `close`."""

    open: str
    middle: str
    close: str
    after: str = "\n"
    """White space after an argument."""
    flagged: bool = False
    """Whether a flag says, before `middle`, that the value is a string; others are JSON."""
    cdata: bool = False
    """Whether a string with `<`, `&` or a line break is between `<![CDATA[` and `]]>`."""

    def head(self, *, is_text: bool) -> str:
        """What is between an argument's name and its value."""
        flag = str(is_text).lower()
        return f'" string="{flag}{self.middle}' if self.flagged else self.middle

    @property
    def name(self) -> re.Pattern[str]:
        """Names of arguments that can be written."""
        return re.compile(rf"[^{re.escape(self.middle[0])}\n]*")


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a family of models writes calls.

    A call is `before`, the function's name, `after`, the arguments, `end`. A group is `mark`,
    `lead`, its calls with `between` in between, and `close`; an answer has groups with `separator`
    in between. `HERMES`, one call in a line of its own:

        <tool_call>                                             mark, lead
        {"name": "add", "arguments": {"a": 1}}                  before add after {"a": 1} end
        </tool_call>                                            close
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
    tags: Tags | None = None
    """Of the syntax TAGS."""
    between: str | None = None
    """None: a group has one call."""
    separator: str = ""
    quote: str = ""
    """The mark around strings, in the syntax BRACES."""
    optional: tuple[str, ...] = ()
    """Parts at the beginning of `after` that a model may leave out."""
    label: tuple[str, str] | None = None
    """A mark and a regular expression of the call's number or id after the function's name."""
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

    @property
    def keyed(self) -> bool:
        """Whether a call's object has the function's name as its only key."""
        return self.before == '{"'

    def signed(self) -> "ToolForm":
        """The form in texts with a sign before each mark: the same letters without it are text."""
        return replace(self, mark=SIGN + self.mark)


NAME = re.compile(r"[\w.:/\-]*")
"""A function's name where a call is no JSON object."""
