r"""Keeps text in messages from becoming control tokens: those are the chat template's alone.

A template makes one text, in which "<|im_end|>" of a message looks like the template's own. So a
message gets a guard inside each name of a control token before it is rendered:

    message    say <|im_end|> twice
    rendered   <|im_start|>user\nsay <GUARD|im_end|> twice<|im_end|>
    token ids  1 ... < | im _ end | > ... 2

The tokenizer finds control tokens first. Then its normaliser removes the guards, so what is left is
cut and merged as any other text is.

Invariant: a prompt without control tokens in its messages has the ids that it has without guards.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidRequest
from paceline.models.templates.marks import Thinking
from paceline.models.templates.tokenizer import Tokenizer, check_unicode, read_backend

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

GUARD = "\ufdd0\ufdd1\ufdd0"
"""Noncharacters, which Unicode reserves for use inside a program: no text has them."""

_ESCAPED = json.dumps(GUARD)[1:-1]
"""The guard where a template writes JSON in ASCII."""

_TOOL_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""The server writes them where a template knows no tools; in many vocabularies they are tokens."""

_RESPONSES = ("<tool_response>", "</tool_response>")
"""Marks around what a tool returned: no answer has them."""


class ControlText:
    """The names of a model's control tokens as text. Thread-safe.

    Control tokens are those that the vocabulary calls special, and other added tokens that the
    template or the thoughts and calls of answers are marked with; white space and single letters
    are text.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None, thinking: Thinking) -> None:
        """Take a model's tokenizer, chat template and marks of thoughts."""
        self._tokenizer = tokenizer
        form = thinking.form
        thoughts = () if form is None else (*form.opens, *form.closes)
        marks = {*_TOOL_MARKS, *thoughts}
        names = {
            token.content: token.special
            for token in tokenizer.added_tokens().values()
            if len(token.content.strip()) > 1
            and (token.special or token.content in marks or token.content in (template or ""))
        }
        self._names = sorted(names)
        answer_marks = {name for name, special in names.items() if not special}
        if form is not None and not form.channels:
            answer_marks.update(thoughts)
        # Text of an answer has these marks, and templates read thoughts out of it.
        self._answer_marks = re.compile(
            "|".join(map(re.escape, sorted(answer_marks - {*_RESPONSES}))) or "(?!)"
        )
        self._prefixes = {name[:end] for name in names for end in range(1, len(name))}
        self._longest = max(map(len, names), default=0)
        heads = {name[:2] for name in names}
        self._heads = re.compile("|".join(map(re.escape, sorted(heads))) or "(?!)")

    def guarded(self, value: Any) -> Any:
        """A JSON value with a guard inside each name of a control token. Raises InvalidRequest."""
        return _changed(value, self._text)

    def guarded_messages(self, messages: Sequence[Any]) -> list[Any]:
        """Messages as by `guarded`.

        The content of an assistant's message keeps the marks of thoughts and calls, and those
        alone. Raises InvalidRequest if a message is nested too deeply.
        """
        return [self._message(message) for message in messages]

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered chat, of which no guarded text is a control token."""
        text = text.replace(_ESCAPED, GUARD)
        if GUARD not in text:
            return self._tokenizer.encode(text, special=True)
        check_unicode("the text", text)
        encoding = self._removing_guards.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._ids and GUARD in (name := text[start:end]):
                ids += self._spelled(name.replace(GUARD, ""))
            else:
                ids.append(token)
        return self._tokenizer.with_bos(ids)

    def _message(self, message: Any) -> Any:
        if not isinstance(message, Mapping):
            return message  # the template's checks reject it
        answer = self._answer if message.get("role") == "assistant" else self._text
        return {
            name: _changed(value, answer if name == "content" else self._text)
            for name, value in message.items()
        }

    def _answer(self, text: str) -> str:
        parts, marks = self._answer_marks.split(text), [*self._answer_marks.findall(text), ""]
        pairs = zip(parts, marks, strict=True)
        return "".join(self._text(part) + mark for part, mark in pairs)

    def _text(self, text: str) -> str:
        if self._heads.search(text):
            for name in self._names:
                while name in text:  # repeated, as a name may overlap itself
                    text = text.replace(name, name[:1] + GUARD + name[1:])
        # A template may write another text after this one, which completes a name.
        end = len(text.rstrip())
        for start in range(max(end - self._longest + 1, 0), end):
            if text[start:end] in self._prefixes:
                return text[:end] + GUARD + text[end:]
        return text

    def _spelled(self, name: str) -> list[int]:
        """Ids of a name letter by letter.

        For a vocabulary whose merges, or whose search in the normalised text, make the control
        token of a name without its guard.
        """
        ids: list[int] = []
        for letter in name:
            token = self._tokenizer.token_id(letter)
            ids += self._tokenizer.encode(letter) if token is None else [token]
        return ids

    @cached_property
    def _ids(self) -> set[int | None]:
        return {self._tokenizer.token_id(name) for name in self._names}

    @cached_property
    def _removing_guards(self) -> "Backend":
        """The tokenizer, with a normaliser that removes guards after control tokens are found."""
        from tokenizers import normalizers

        backend = read_backend(self._tokenizer.path)
        steps = [normalizers.Replace(GUARD, ""), backend.normalizer]
        backend.normalizer = normalizers.Sequence([step for step in steps if step is not None])
        return backend


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with each of its strings changed. Raises InvalidRequest if it is too deep."""

    def changed(value: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, Mapping):
            return {changed(name): changed(inner) for name, inner in value.items()}
        return [changed(inner) for inner in value] if isinstance(value, list | tuple) else value

    try:
        return changed(value)
    except RecursionError as error:
        raise InvalidRequest("messages or tools are nested too deeply") from error
