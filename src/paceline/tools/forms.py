"""The formats of tool calls, by family of models, and the choice of one by a chat template.

They are in `forms.json`, in the order in which their signs are looked for: the fields of a
`ToolForm`, `like` the form that has the others, and the `models` that write so, by their published
templates. `calls.py` reads and writes the calls of a form, and `constraints` makes its grammar.
Invariant: a template of an unknown form gets none, so that what the model writes remains text.
"""

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from pathlib import Path
from typing import Any

from paceline.decoding.text import SIGN


class Syntax(StrEnum):
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
    tags: Tags = Tags("", "", "")
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

    def new_id(self) -> str:
        """Return an id for a call, as the templates demand."""
        length = self.id_length
        return secrets.token_hex(length)[:length] if length else f"call_{secrets.token_hex(12)}"


NAME = re.compile(r"[\w.:/\-]*")
"""A function's name where a call is no JSON object."""


def _form(name: str, table: Mapping[str, Mapping[str, Any]]) -> ToolForm:
    entry = dict(table[name])
    while "like" in entry:
        entry = {**table[entry.pop("like")], **entry}
    del entry["models"]
    for key in ("tokens", "optional", "label"):
        if key in entry:
            entry[key] = tuple(entry[key])
    entry["signs"] = tuple(map(re.compile, entry["signs"]))
    entry["syntax"] = Syntax(entry["syntax"])
    if "tags" in entry:
        entry["tags"] = Tags(**entry["tags"])
    return ToolForm(name, **entry)


_TABLE = json.loads(Path(__file__).with_name("forms.json").read_text(encoding="utf-8"))

FORMS = {name: _form(name, _TABLE) for name in _TABLE}
"""The first form whose signs are all in the template is the model's."""

HERMES = FORMS["hermes"]


def tool_form(template: str | None) -> ToolForm | None:
    """The form of a chat template; None: it has tools in no known form.

    Templates without tools get `HERMES`, which the prompt then describes; if they have calls as
    DeepSeek V3.1's, that form.
    """
    if template is None:
        return HERMES
    known = [form for form in FORMS.values() if all(sign.search(template) for sign in form.signs)]
    if "tools" in template:
        return known[0] if known else None
    deepseek = FORMS["deepseek"]
    return deepseek if deepseek in known and "```json" not in template else HERMES
