r"""Keeps text in messages from becoming control tokens: only the chat template may write those.

A template returns one text, where "<|im_end|>" from a message looks like the template's own. So
each name of a control token in a message gets a guard before rendering:

    message    say <|im_end|> twice
    rendered   <|im_start|>user\nsay <GUARD|im_end|> twice<|im_end|>
    token ids  1 ... < | im _ end | > ... 2

The tokenizer finds control tokens first. Then its normalizer removes the guards, and the rest is
split and merged like any other text.

Invariant: a prompt without control tokens in its messages has the same ids as without guards.
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
"""Noncharacters, which Unicode reserves for use inside a program: no text contains them."""

_ESCAPED = json.dumps(GUARD)[1:-1]
"""The guard in a template that writes JSON in ASCII."""

_TOOL_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""The server writes them if a template does not support tools; many vocabularies have them."""

_RESPONSES = ("<tool_response>", "</tool_response>")
"""Tags around a tool's result; no answer contains them."""


class ControlText:
    """Writes the names of a model's control tokens as text. Thread-safe.

    Control tokens are those that the vocabulary calls special, and other added tokens that occur
    in the template or as tags of reasoning and tool calls; white space and single letters are
    text.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None, thinking: Thinking) -> None:
        """Take a model's tokenizer, chat template and reasoning format."""
        self._tokenizer = tokenizer
        form = thinking.form
        reasoning = () if form is None else (*form.opens, *form.closes)
        tags = {*_TOOL_TAGS, *reasoning}
        names = {
            token.content: token.special
            for token in tokenizer.added_tokens().values()
            if len(token.content.strip()) > 1
            and (token.special or token.content in tags or token.content in (template or ""))
        }
        self._names = sorted(names)
        answer_tags = {name for name, special in names.items() if not special}
        if form is not None and not form.channels:
            answer_tags.update(reasoning)
        # An answer's text has these tags, and templates parse its reasoning.
        self._answer_tags = re.compile(
            "|".join(map(re.escape, sorted(answer_tags - {*_RESPONSES}))) or "(?!)"
        )
        self._prefixes = {name[:end] for name in names for end in range(1, len(name))}
        self._longest = max(map(len, names), default=0)
        heads = {name[:2] for name in names}
        self._heads = re.compile("|".join(map(re.escape, sorted(heads))) or "(?!)")

    def guarded(self, value: Any) -> Any:
        """Add a guard inside each control-token name in a JSON value. Raises InvalidRequest."""
        return _changed(value, self._text)

    def guarded_messages(self, messages: Sequence[Any]) -> list[Any]:
        """Guard messages like `guarded`.

        An assistant's content keeps the tags of reasoning and tool calls; other names are guarded.
        Raises InvalidRequest if a message is nested too deeply.
        """
        return [self._message(message) for message in messages]

    def encode(self, text: str) -> list[int]:
        """Encode a rendered chat so that guarded text never becomes a control token."""
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
        parts, tags = self._answer_tags.split(text), [*self._answer_tags.findall(text), ""]
        pairs = zip(parts, tags, strict=True)
        return "".join(self._text(part) + tag for part, tag in pairs)

    def _text(self, text: str) -> str:
        if self._heads.search(text):
            for name in self._names:
                while name in text:  # repeated, as a name may overlap itself
                    text = text.replace(name, name[:1] + GUARD + name[1:])
        # A template may write text after this one that completes a name.
        end = len(text.rstrip())
        for start in range(max(end - self._longest + 1, 0), end):
            if text[start:end] in self._prefixes:
                return text[:end] + GUARD + text[end:]
        return text

    def _spelled(self, name: str) -> list[int]:
        """Return the ids of a name letter by letter.

        For a vocabulary whose merges, or whose search in the normalized text, produce the control
        token from a name without its guard.
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
        """The tokenizer, with a normalizer that removes guards after control tokens are found."""
        from tokenizers import normalizers

        backend = read_backend(self._tokenizer.path)
        steps = [normalizers.Replace(GUARD, ""), backend.normalizer]
        backend.normalizer = normalizers.Sequence([step for step in steps if step is not None])
        return backend


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """Change each string in a JSON value. Raises InvalidRequest if it is nested too deeply."""

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
