"""Compiles constraints: JSON, a schema, a regular expression, a grammar, tool calls.

`matcher.py` applies them; `call_grammar.py` has the grammar of calls. Independent of engines and
requests. Invariant: an invalid constraint is rejected before decoding, with llguidance's reason.

JSON has the format of Python's `json.dumps`, on one line: llguidance's settings under a schema's
key "x-guidance" are replaced.
"""

import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.constraints.call_grammar import CallGrammar, literal
from paceline.constraints.matcher import GrammarConstraint, library, reason
from paceline.constraints.matcher_process import Caller, MatcherProcesses
from paceline.constraints.schemas import (
    KEYWORDS,
    MAX_EXACT,
    SCALARS,
    IsPart,
    left_out,
    never_followed,
    takes_nothing,
)
from paceline.constraints.value_grammar import EMPTY
from paceline.decoding.reasoning import ReasoningMarks
from paceline.decoding.types import Constraint
from paceline.errors import Busy, InvalidRequest, ModelError
from paceline.models import Tokenizer, check_unicode
from paceline.tools.forms import HERMES, Syntax, ToolForm

MAX_FUNCTIONS = 128
"""OpenAI's limit."""

MAX_CHARACTERS = 64 * 1024
"""Limit of a schema, expression or grammar."""

_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)

_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""With free white space nothing would be forced, and small models never end it."""

_ANY = {
    "anyOf": [
        {"type": ["object", "array", "string", "boolean", "null"]},
        {"type": "integer", "minimum": -MAX_EXACT, "maximum": MAX_EXACT},
    ]
}
"""For a schema without constraints: small models never end a number of unlimited length."""

_LENIENT = {**_ONE_LINE, "lenient": True}
"""For arguments, which their function checks again: keywords that llguidance does not know are
ignored. Schemas of real agents have some (`propertyNames`)."""


class Grammars:
    """Compiles constraints for one model. Thread-safe.

    Compiling takes milliseconds, a second for the largest schemas, in another process.
    """

    def __init__(
        self, tokenizer: Path, *, vocab_size: int, stop_token_ids: Collection[int]
    ) -> None:
        """Prepare for a tokenizer.json, which is read at the first constraint.

        `vocab_size` are the columns of the engine's logits, perhaps more than the tokenizer's
        tokens; the stop tokens are allowed where a constraint allows the answer's end.
        """
        self._path = tokenizer
        self._vocab_size = vocab_size
        self._stops = frozenset(stop_token_ids)
        self._caller: Caller | None = None

    def for_caller(self, caller: Caller) -> "Grammars":
        """Return a copy for a request that waits as `caller`: its constraints also raise Busy."""
        assert self._processes  # started once, for all
        bound = copy(self)
        bound._caller = caller
        return bound

    def json_object(self) -> Constraint:
        """Constrain answers to any JSON object.

        All methods raise InvalidRequest for an invalid or too complex structure, MissingExtra if
        llguidance is missing, and ModelError for a tokenizer that it cannot use.
        """
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: Mapping[str, Any]) -> Constraint:
        """Constrain answers to JSON that matches a schema, with properties in its order."""
        what = "the JSON schema"
        with _shallow(what):
            _schema(what, schema)
            followed, parts = left_out(schema, never_followed)
            if parts:
                raise InvalidRequest(f"{what} is not supported; remove {parts[0]}")
            if not followed.keys() & KEYWORDS:
                followed |= _ANY
            try:
                return self._constraint(what, _document("json_schema", _schema(what, followed)))
            except InvalidRequest as error:
                _, parts = left_out(followed, self._is_refused)
                if not parts:
                    raise
                raise InvalidRequest(f"{error}; remove {parts[0]}") from None

    def regex(self, text: str) -> Constraint:
        """Constrain answers to full matches of a regular expression (Rust's, no look-around)."""
        what = "the regular expression"
        _check_text(what, text)
        return self._constraint(what, library().LLMatcher.grammar_from_regex(text))

    def lark(self, text: str) -> Constraint:
        """Constrain answers to the rule `start` of a grammar in llguidance's Lark syntax.

        One in llama.cpp's GBNF, whose rule is `root`, is converted.
        """
        what = "the grammar"
        _check_text(what, text)
        if _GBNF.search(text):
            try:
                text = library().gbnf_to_lark.gbnf_to_lark(text)
            except Exception as error:  # it raises Exception itself
                raise InvalidRequest(f"{what} is not GBNF: {reason(str(error))}") from error
        return self._constraint(what, _lark_document(text))

    def tools(
        self,
        functions: Sequence[Mapping[str, Any]],
        choice: str = "auto",
        *,
        parallel: bool = True,
        form: ToolForm = HERMES,
        thoughts: ReasoningMarks | None = None,
    ) -> Constraint:
        """Constrain tool calls: their arguments match the functions' parameters.

        Args:
            functions: objects {"name": ..., "parameters": JSON schema}; "parameters" may be
                left out. Other keys, and keywords that llguidance does not know, are ignored.
            choice: "auto" allows any text around calls; "required" only calls; a function's name
                only calls of it.
            parallel: whether several calls are allowed; else the answer ends after the first.
            form: how the model writes calls.
            thoughts: how it marks thoughts, which may precede calls; "auto" allows any.
        """

        def compiled(parameters: Mapping[str, Mapping[str, Any]]) -> Constraint:
            calls = CallGrammar(
                form,
                parameters,
                written=lambda text: self._in_lark(text, form),
                token=self._mark,
            )
            if choice == "auto":
                lark = calls.free(parallel=parallel, tokens=self._specials(form))
            else:
                lark = calls.forced(parallel=parallel, thoughts=thoughts)
            if form.syntax is not Syntax.JSON:  # its own grammar ignores unsupported keywords
                schemas = " | ".join(f"%json {json.dumps(s)}" for s in parameters.values())
                self._constraint("the functions", _lark_document(f"start: {schemas}"))
            return self._constraint("the functions", _lark_document(lark))

        with _shallow("a function's parameters"):
            parameters = _parameters(functions)
            if choice not in ("auto", "required"):
                if choice not in parameters:
                    known = ", ".join(parameters)
                    raise InvalidRequest(f"unknown function {choice!r}; expected {known}")
                parameters = {choice: parameters[choice]}
            parameters = _followed(parameters, never_followed)
            try:
                return compiled(parameters)
            except InvalidRequest:
                without = _followed(parameters, self._is_refused)
                if without != parameters:
                    parameters = without
                    with suppress(InvalidRequest):
                        return compiled(parameters)
                with suppress(Busy):
                    self._check_schemas(parameters)
                raise

    def token_of(self, mark: str) -> int | None:
        """Return the model's own token for a mark, or None if the model writes it in letters."""
        token = self._tokenizer.token_id(mark)
        return token if token in self._special_ids else None

    def _check_schemas(self, parameters: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise InvalidRequest, which names the function, for a schema that is none."""
        for name, schema in parameters.items():
            what = f"the parameters of the function {name!r}"
            self._constraint(what, _document("json_schema", _schema(what, schema, _LENIENT)))

    def _is_refused(self, keyword: str, value: Any) -> bool:
        """Return whether llguidance refuses a bound, pattern or format on its own."""
        if keyword not in SCALARS:
            return False
        with suppress(InvalidRequest):
            self._constraint(keyword, _document("json_schema", json.dumps({keyword: value})))
            return False
        return True

    def _in_lark(self, text: str, form: ToolForm) -> str:
        """Return a text in Lark, with the model's tokens for the form's marks."""
        marks = "|".join(map(re.escape, form.tokens)) or "(?!)"
        parts = [part for part in re.split(f"({marks})", text) if part]
        lark = (self._mark(part) if part in form.tokens else literal(part) for part in parts)
        return " ".join(lark) or EMPTY

    def _mark(self, text: str) -> str:
        """Return a mark in Lark: the model's token for it, if it has one."""
        if self._tokenizer.token_id(text) in self._stops:
            return EMPTY  # it ends the answer
        token = self.token_of(text)
        return literal(text) if token is None else f"<[{token}]>"

    def _specials(self, form: ToolForm) -> str:
        """Return Lark ranges of the special tokens that free text may contain, such as <think>."""
        marks = {form.mark, *(text for text in form.tokens if text in form.close)}
        barred = {self._tokenizer.token_id(mark) for mark in marks}
        return _ranges(token for token in self._special_ids if token not in barred)

    @cached_property
    def _special_ids(self) -> list[int]:
        return self._processes.special_tokens()

    def _constraint(self, what: str, grammar: str) -> Constraint:
        caller = self._caller or Caller()
        return GrammarConstraint(what, self._processes, grammar, self._vocab_size, caller)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer(self._path)

    @cached_property
    def _processes(self) -> MatcherProcesses:
        library()
        known = self._tokenizer.vocab_size
        stops = sorted(token for token in self._stops if token < known)
        if not stops:
            raise ModelError(
                f"{self._path} has no stop token, which a constrained answer needs to end"
            )
        return MatcherProcesses(self._path, vocab_size=max(self._vocab_size, known), stops=stops)


def _document(kind: str, value: str) -> str:
    """Return llguidance's JSON document around `value`, which is JSON text."""
    return f'{{"grammars": [{{"{kind}": {value}}}]}}'


def _lark_document(text: str) -> str:
    return _document("lark_grammar", json.dumps(text))


@contextmanager
def _shallow(what: str) -> Iterator[None]:
    """Raise InvalidRequest where the nesting of `what` exceeds Python's limit."""
    try:
        yield
    except RecursionError:
        raise InvalidRequest(f"{what} is nested too deeply") from None


def _parameters(functions: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return name -> JSON schema of the arguments."""
    if not 1 <= len(functions) <= MAX_FUNCTIONS:
        raise InvalidRequest(f"there are {len(functions)} functions; expected 1 to {MAX_FUNCTIONS}")
    schemas: dict[str, dict[str, Any]] = {}
    size = 0
    for place, function in enumerate(functions):
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"function {place} has no name; expected a string")
        if name in schemas:
            raise InvalidRequest(f"two functions are called {name!r}; expected unique names")
        what = f"the parameters of the function {name!r}"
        schema = function.get("parameters")
        schema = {} if schema is None else schema
        if isinstance(schema, Mapping) and schema.get("type", "object") != "object":
            raise InvalidRequest(f"{what} are of type {schema['type']!r}; expected 'object'")
        size += len(_schema(what, schema))
        schemas[name] = {"type": "object", **schema, "x-guidance": _LENIENT}
    if size > 4 * MAX_CHARACTERS:
        raise InvalidRequest(
            f"the parameters of all functions have {size} characters together; expected at most "
            f"{4 * MAX_CHARACTERS}"
        )
    return schemas


def _followed(
    parameters: Mapping[str, Mapping[str, Any]], is_part: IsPart
) -> dict[str, dict[str, Any]]:
    """Functions' parameters without the parts that cannot be followed, which are logged."""
    followed = {}
    for name, schema in parameters.items():
        what = f"the parameters of the function {name[:100]!r}"
        followed[name], parts = left_out(schema, is_part)
        if takes_nothing(followed[name]):
            followed[name]["additionalProperties"] = False
        for part in parts:
            _log(f"{what} are followed without {part}")
    return followed


@lru_cache(maxsize=1024)
def _log(line: str) -> None:
    """Log a line once; agents send the same functions again and again."""
    logging.getLogger("paceline.server").warning("%s", line)


def _schema(what: str, schema: Mapping[str, Any], settings: Mapping[str, Any] = _ONE_LINE) -> str:
    """Return a schema as text, with llguidance's settings."""
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"{what} is {schema!r}; expected an object")
    try:
        text = json.dumps({**schema, "x-guidance": settings}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} is not JSON: {reason(str(error))}") from error
    _check_text(what, text)
    return text


def _check_text(what: str, text: str) -> None:
    check_unicode(what, text)
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequest(
            f"{what} has {len(text)} characters; expected at most {MAX_CHARACTERS}"
        )


def _ranges(ids: Iterable[int]) -> str:
    """Return token ids as Lark ranges: 3,5-9."""
    ids = sorted(ids)
    cuts = [0, *(at + 1 for at, (a, b) in enumerate(pairwise(ids)) if b != a + 1), len(ids)]
    runs = [ids[start:end] for start, end in pairwise(cuts) if end > start]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
