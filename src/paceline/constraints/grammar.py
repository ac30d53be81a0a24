"""Answers of a form: JSON, a schema, a regular expression, a grammar, calls of functions.

Knows llguidance's languages and one tokenizer; `constraint.py` follows what it makes, and
`tool_calls.py` has the form of calls. Knows nothing of engines or requests. The rule: what cannot
be followed whole is refused before anything runs, with the library's reason in one line.

JSON is written as Python's `json.dumps` writes it, on one line; a schema that wants it otherwise
says so under "x-guidance", as llguidance has it.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.constraints.matcher import Exact, Matched, library, reason
from paceline.constraints.tool_calls import (
    CLOSE,
    OPEN,
    Parsed,
    ToolCall,
    calls_grammar,
    literal,
    parse_tool_calls,
)
from paceline.decoding.types import Constraint
from paceline.errors import InvalidRequest, ModelError
from paceline.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

__all__ = ["CLOSE", "OPEN", "Grammars", "Parsed", "ToolCall", "parse_tool_calls"]

MAX_CHARACTERS = 64 * 1024
"""The longest schema, expression or grammar."""

MAX_FUNCTIONS = 128
"""The most functions to choose from, as OpenAI has it."""

_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space anywhere would leave nothing forced, and small models go on with it for ever."""


class Grammars:
    """Makes constraints for one model. Safe to use from several threads.

    Compiling takes milliseconds, for the largest schemas a second; it does not hold the GIL.
    """

    def __init__(
        self, tokenizer: Path, *, vocab_size: int, stop_token_ids: Collection[int]
    ) -> None:
        """Prepare for the model of a tokenizer.json, which is read at the first constraint.

        Args:
            tokenizer: the path of the file.
            vocab_size: columns of the engine's rows; may be more than the tokenizer's tokens.
            stop_token_ids: what ends an answer, where the form allows its end.
        """
        self._path = tokenizer
        self._vocab_size = vocab_size
        self._stops = frozenset(stop_token_ids)

    def json_object(self) -> Constraint:
        """A JSON object of any kind.

        This and the others raise MissingExtra without llguidance, and ModelError for a tokenizer
        that llguidance cannot use.
        """
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: Mapping[str, Any]) -> Constraint:
        """JSON that is valid against a schema, its properties in the schema's order.

        Raises:
            InvalidRequest: the schema is wrong, cannot be met, or says what llguidance does not
                know.
        """
        what = "the JSON schema"
        return self._made(what, _document("json_schema", _schema(what, schema)))

    def regex(self, text: str) -> Constraint:
        """A text that a regular expression matches as a whole (Rust's syntax, no look-around).

        Raises:
            InvalidRequest: the expression is wrong or too complex.
        """
        what = "the regular expression"
        _fits(what, text)
        return self._made(what, library().LLMatcher.grammar_from_regex(text))

    def lark(self, text: str) -> Constraint:
        """A text of a grammar in llguidance's kind of Lark, whose rule `start` is the whole.

        Raises:
            InvalidRequest: the grammar is wrong, matches nothing or is too complex.
        """
        what = "the grammar"
        _fits(what, text)
        return self._made(what, _document("lark_grammar", json.dumps(text)))

    def tools(
        self,
        functions: Sequence[Mapping[str, Any]],
        choice: str = "auto",
        *,
        parallel: bool = True,
    ) -> Constraint:
        """Calls of functions, with arguments that are valid against their parameters.

        Args:
            functions: each {"name": ..., "parameters": JSON schema}; without parameters it takes
                none. What else they say is not looked at.
            choice: "auto" leaves text free up to each `<tool_call>`; "required" lets nothing come
                but calls; a function's name lets nothing come but calls of it.
            parallel: whether there may be several calls. After the only one comes the end.

        Raises:
            InvalidRequest: a function is wrong, two have one name, or there is none of that name.
        """
        parameters = _parameters(functions)
        if choice not in ("auto", "required"):
            if choice not in parameters:
                known = ", ".join(parameters)
                raise InvalidRequest(f"there is no function {choice!r} to call; expected {known}")
            parameters = {choice: parameters[choice]}
        free = choice == "auto"
        lark = calls_grammar(
            parameters,
            marks=(self._mark(OPEN), self._mark(CLOSE)),
            tokens=self._specials if free else "",
            free=free,
            parallel=parallel,
        )
        try:
            return self._made("the functions", _document("lark_grammar", json.dumps(lark)))
        except InvalidRequest:
            for name, schema in parameters.items():
                # Whose fault it is shows when each is tried alone.
                what = f"the parameters of the function {name!r}"
                self._made(what, _document("json_schema", schema))
            raise

    def _mark(self, text: str) -> str:
        """A mark in Lark: the model's own token for it, where it has one that is text."""
        token = self._tokenizer.token_id(text)
        if token is None or text in self._tokenizer.special_tokens():
            return literal(text)  # as a control token it would not be in the answer's text
        return f"<[{token}]>" if self._tokens.is_special_token(token) else literal(text)

    @cached_property
    def _specials(self) -> str:
        """The tokens that llguidance does not count as text, but free text may have: Lark ranges.

        Among them are those that begin and end a thought.
        """
        marks = {self._tokenizer.token_id(mark) for mark in (OPEN, CLOSE)}
        ids = [i for i in range(self._tokens.vocab_size) if self._tokens.is_special_token(i)]
        return _ranges(token for token in ids if token not in marks)

    def _made(self, what: str, grammar: str) -> Constraint:
        return Matched(what, self._tokens, grammar, self._vocab_size)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer(self._path)

    @cached_property
    def _tokens(self) -> "LLTokenizer":
        llguidance = library()
        known = self._tokenizer.vocab_size
        stops = sorted(token for token in self._stops if token < known)
        if not stops:
            raise ModelError(
                f"no token of {self._path} ends an answer, so none can have a given form"
            )
        parsed = json.loads(self._path.read_text(encoding="utf-8"))
        # What is forced may be longer than what the model was trained to read at once.
        text = json.dumps({**parsed, "truncation": None, "padding": None}, ensure_ascii=False)
        try:
            read = llguidance.LLTokenizer(
                text, n_vocab=max(self._vocab_size, known), eos_token=stops
            )
        except ValueError as error:
            raise ModelError(
                f"{self._path} is no tokenizer that llguidance can use: {reason(str(error))}"
            ) from error
        exact = llguidance.TokenizerWrapper(Exact(read))
        made: LLTokenizer = llguidance.LLTokenizer(exact, eos_token=stops)
        return made


def _document(kind: str, value: str) -> str:
    """What llguidance compiles: the JSON around `value`, which is JSON already."""
    return f'{{"grammars": [{{"{kind}": {value}}}]}}'


def _parameters(functions: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Name -> the JSON schema of the arguments, as text."""
    if not 1 <= len(functions) <= MAX_FUNCTIONS:
        raise InvalidRequest(f"there are {len(functions)} functions; expected 1 to {MAX_FUNCTIONS}")
    found: dict[str, str] = {}
    for place, function in enumerate(functions):
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"function {place} has no name; expected a text")
        if name in found:
            raise InvalidRequest(f"two functions are called {name!r}; expected one")
        what = f"the parameters of the function {name!r}"
        schema = function.get("parameters")
        if schema is None:
            schema = {"properties": {}, "additionalProperties": False}
        if isinstance(schema, Mapping) and schema.get("type", "object") != "object":
            raise InvalidRequest(f"{what} are of type {schema['type']!r}; expected 'object'")
        found[name] = _schema(what, schema, {"type": "object"})
    size = sum(map(len, found.values()))
    if size > 4 * MAX_CHARACTERS:
        raise InvalidRequest(
            f"the parameters of all functions have {size} characters together; expected at most "
            f"{4 * MAX_CHARACTERS}"
        )
    return found


def _schema(what: str, schema: Mapping[str, Any], also: Mapping[str, Any] | None = None) -> str:
    """A schema as text, on one line unless it says otherwise."""
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"{what} is {schema!r}; expected an object")
    try:
        text = json.dumps({"x-guidance": _ONE_LINE, **(also or {}), **schema}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} is no JSON: {reason(str(error))}") from error
    _fits(what, text)
    return text


def _fits(what: str, text: str) -> None:
    """Raises InvalidRequest for a text that is too long, or that no file could hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{what} is not valid Unicode: unpaired surrogate at character {error.start}"
        ) from error
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequest(
            f"{what} has {len(text)} characters; expected at most {MAX_CHARACTERS}"
        )


def _ranges(ids: Iterable[int]) -> str:
    """Token ids as Lark has them: 3,5-9."""
    ids = sorted(ids)
    cuts = [0, *(at + 1 for at, (a, b) in enumerate(pairwise(ids)) if b != a + 1), len(ids)]
    runs = [ids[start:end] for start, end in pairwise(cuts) if end > start]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
