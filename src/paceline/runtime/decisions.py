"""Typed questions about one input, answered with probabilities instead of text.

Each question is a separate chat: the input, then the question with its options under labels. The
row of logits at the start of the answer has a score for each label, and a softmax over them in
float64 is the decision. No token is sampled.

    input, question 1, answer:  A  0.93   B  0.07
    input, question 2, answer:  A  0.21   B  0.55   C  0.24

A label is one token: a letter, or two letters that are one token in the vocabulary. If there are
too few, labels are scored along their tokens up to the end of the turn.

Invariant: the probabilities of a question depend on the input and on that question alone, to the
last bit. All rows are prefill: they are bit-identical however prompts are cut into blocks, and
whatever other sequences run.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.decoding.types import Block, Logits, Step, common_prefix_length
from paceline.engines.base import KVSequence, StepResult
from paceline.errors import InvalidRequest
from paceline.models import ModelFiles
from paceline.runtime.answer import PrefillJob
from paceline.runtime.prompt import Message, TemplateChat, encode_prompt, render_chat, text_of
from paceline.runtime.request import Request

MAX_QUESTIONS = 400
_MAX_OPTIONS = 255
_LABELS = [*ascii_uppercase, *(a + b for a in ascii_uppercase for b in ascii_uppercase)]

_LISTS = {"predicate": ("", ""), "choice": ("choices", "value"), "score": ("levels", "label")}
"""Type of a question -> the field with its options, and the field with an option's value."""

_ASKS = {
    "predicate": "Is this statement about the text above true?\n{}",
    "choice": "{}",
    "score": "{}\nRate it on these levels, from the lowest to the highest:",
}


@dataclass(frozen=True, slots=True)
class Question:
    """A question in the format of OpenAI's decisions."""

    type: str
    """`predicate`, `choice` or `score`."""
    instructions: str
    options: Mapping[str | bool, str]
    """Value -> text, in the order of the request; those of a predicate are True and False."""
    name: str | None = None

    def text(self, labels: Sequence[str]) -> str:
        pairs = zip(labels, self.options.values(), strict=False)
        options = (f"{label}. {text}" for label, text in pairs)
        asks = _ASKS[self.type].format(self.instructions)
        return "\n".join([asks, "", *options, "", "Answer with the letter of one option."])


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer to a question."""

    question: Question
    probabilities: Sequence[float]
    """The probability of each option, in the order of the question; their sum is 1."""

    @property
    def probability(self) -> float:
        """The probability that a predicate is true."""
        return self.probabilities[0]

    @property
    def choice(self) -> str | bool:
        """The most likely option; the first of equals."""
        return [*self.question.options][self._best]

    @property
    def score(self) -> float:
        """The expected level, where the lowest is 0."""
        return math.fsum(level * part for level, part in enumerate(self.probabilities))

    @property
    def confidence(self) -> float:
        """A number from 0, for equal probabilities, to 1, for a certain option.

        The formulas are TypeSafe's. Choice: how far the best probability is above the uniform one.
        Score: 1 minus the mean distance to the best level, over that of a uniform distribution to
        its middle.
        """
        count, best = len(self.probabilities), self._best
        if self.question.type != "score":
            return (self.probabilities[best] - 1 / count) / (1 - 1 / count)
        distance = math.fsum(p * abs(at - best) for at, p in enumerate(self.probabilities))
        uniform = math.fsum(abs(at - (count - 1) / 2) for at in range(count)) / count
        return max(1 - distance / uniform, 0.0)

    @property
    def _best(self) -> int:
        return self.probabilities.index(max(self.probabilities))

    def as_dict(self) -> dict[str, Any]:
        """Return the decision as JSON, in OpenAI's format."""
        kind = self.question.type
        answer: dict[str, Any] = {"type": kind, "name": self.question.name}
        if kind == "predicate":
            return {**answer, "probability": self.probability}
        pairs = enumerate(zip(self.question.options, self.probabilities, strict=True))
        if kind == "choice":
            listed = [{"value": value, "probability": part} for _, (value, part) in pairs]
        else:
            listed = [{"value": n, "label": one, "probability": part} for n, (one, part) in pairs]
        more = {"confidence": self.confidence, "probabilities": listed}
        return {**answer, kind: getattr(self, kind), **more}


@dataclass(frozen=True, slots=True)
class Decisions:
    """The answers to all questions of a request."""

    answers: Sequence[Decision]
    """Answers in the order of the questions."""
    model: str
    input_tokens: int
    """Tokens of the shared input, once, and of the questions."""
    cached_tokens: int
    """Input tokens that earlier requests had computed."""
    exact: bool
    """True if rows were measured to be bit-identical in all requests on this machine."""

    def as_dict(self) -> dict[str, Any]:
        """Return the decisions as JSON: OpenAI's response, and `exact`."""
        details = {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0}
        usage = {
            "input_tokens": self.input_tokens,
            "input_tokens_details": details,
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.input_tokens,
        }
        answers = [answer.as_dict() for answer in self.answers]
        return {"answers": answers, "model": self.model, "usage": usage, "exact": self.exact}


# -- reading a request -----------------------------------------------------------------------------


def read_questions(given: Any) -> list[Question]:
    """Check questions in OpenAI's format. Raises InvalidRequest, which names the field."""
    is_list = isinstance(given, list | tuple) and 1 <= len(given) <= MAX_QUESTIONS
    _check(is_list, "questions", f"a list of 1 to {MAX_QUESTIONS} questions")
    return [_question(one, f"questions[{place}]") for place, one in enumerate(given)]


def _check(holds: bool, path: str, expected: str) -> None:
    if not holds:
        raise InvalidRequest(f"{path}: expected {expected}")


def _fields(given: Any, path: str, *names: str) -> list[Any]:
    """Return the values of an object's fields, with None for missing ones; reject other fields."""
    _check(isinstance(given, Mapping), path, "an object")
    allowed = f"no other fields than {', '.join(filter(None, names))}"
    for name, value in given.items():
        _check(name in names or value is None, f"{path}.{name!s:.40}", allowed)
    return [given.get(name) for name in names]


def _question(given: Any, path: str) -> Question:
    kind: Any = given.get("type") if isinstance(given, Mapping) else None
    _check(isinstance(kind, str) and kind in _LISTS, f"{path}.type", "predicate, choice or score")
    listed, key = _LISTS[kind]
    _, content, name, given_options = _fields(given, path, "type", "instructions", "name", listed)
    try:
        instructions = text_of(content)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}.instructions{error}") from None
    _check(bool(instructions.strip()), f"{path}.instructions", "text")
    _check(isinstance(name, str | None), f"{path}.name", "text")
    if not listed:
        return Question(kind, instructions, {True: "true", False: "false"}, name)
    return Question(kind, instructions, _options(given_options, f"{path}.{listed}", key), name)


def _options(given: Any, path: str, key: str) -> dict[str | bool, str]:
    is_list = isinstance(given, list | tuple) and 2 <= len(given) <= _MAX_OPTIONS
    _check(is_list, path, f"a list of 2 to {_MAX_OPTIONS}")
    options: dict[str | bool, str] = {}
    for place, one in enumerate(given):
        value, about = _fields(one, f"{path}[{place}]", key, "description")
        where, is_flag = f"{path}[{place}].{key}", isinstance(value, bool) and key == "value"
        _check(is_flag or (isinstance(value, str) and value != ""), where, "text")
        _check(value not in options, where, f"each once, and {value!r:.40} is there twice")
        _check(isinstance(about, str | None), f"{path}[{place}].description", "text")
        text = json.dumps(value) if is_flag else value
        options[value] = f"{text}: {about}" if about else text
    return options


# -- from questions to prompts ---------------------------------------------------------------------


class EncodedQuestion(NamedTuple):
    question: Question
    prompt: list[int]
    labels: Sequence[Sequence[int]]
    """Token ids of each option's label."""

    @property
    def length(self) -> int:
        """The number of slots for the prompt and its longest label."""
        return len(self.prompt) + max(map(len, self.labels))


def encode_questions(
    files: ModelFiles,
    given: str | Sequence[Message],
    questions: Sequence[Question],
    request: Request,
) -> list[EncodedQuestion]:
    """Return the prompt of each question about an input: a text, or the messages of a chat.

    Raises InvalidRequest if the chat template rejects the input, and for a model that always
    reasons before it answers.
    """
    chat = [{"role": "user", "content": given}] if isinstance(given, str) else given
    texts = [isinstance(one, Mapping) and one.get("content") for one in chat]
    _check(any(texts), "input", "text, or messages with text")
    try:
        variables = files.thinking.switch(False)
    except InvalidRequest as error:
        raise InvalidRequest(f"decisions are made without reasoning, and {error}") from error
    codes = _codes(files, variables, max(len(one.options) for one in questions))
    single = [code for code in codes if len(codes[code]) == 1]
    asked = []
    for question in questions:
        count = len(question.options)
        names = (single if count <= len(single) else _LABELS)[:count]
        message = {"role": "user", "content": question.text(names)}
        try:
            tokens, rendered = encode_prompt(files, [*chat, message], request)
        except InvalidRequest as error:
            path = str(error).replace("messages[", "input[", 1)
            raise InvalidRequest(path) from error
        if rendered.thoughts is not None and rendered.thoughts.inside:
            raise InvalidRequest(
                f"decisions are made without reasoning, and {files.short_name} begins with it"
            )
        asked.append(EncodedQuestion(question, tokens, [codes[name] for name in names]))
    return asked


def _codes(files: ModelFiles, variables: Mapping[str, Any], count: int) -> dict[str, Sequence[int]]:
    """Return labels -> their token ids at the start of an answer, enough for `count` options.

    Some templates write a space before an answer, which is then part of a label's token.
    """
    user = {"role": "user", "content": "?"}
    prompt = begun = render_chat(files, TemplateChat([user]), variables).text
    first = _LABELS[0]
    try:
        answer = {"role": "assistant", "content": first}
        text = render_chat(files, TemplateChat([user, answer], begun=True), variables).text
    except InvalidRequest:  # the template cannot leave an answer open
        text = prompt + first
    if text.startswith(prompt) and text.endswith(first):
        begun = text.removesuffix(first)
    encode = files.control_text.encode
    before = encode(prompt)
    codes: dict[str, Sequence[int]] = {}
    single = 0
    for place, label in enumerate(_LABELS):
        if place >= count and single >= count:
            break
        tokens = encode(begun + label)
        inside = tokens[: len(before)] == before
        codes[label] = tokens[len(before) :] if inside else files.tokenizer.encode(label)
        single += len(codes[label]) == 1
    return codes


# -- the job ---------------------------------------------------------------------------------------


class DecisionJob(PrefillJob):
    """The rows of all questions, one after another, in one sequence that keeps the shared input."""

    def __init__(
        self,
        sequence: KVSequence,
        asked: Sequence[EncodedQuestion],
        decided: list[Decision],
        files: ModelFiles,
        exact: Callable[[], bool],
    ) -> None:
        """Continue after the questions in `decided`, in a sequence with a prefix of the input.

        A job that starts over after a preemption finds its decisions there. `exact` is called at
        the end.
        """
        super().__init__(sequence, shared_input(asked))
        self._asked, self._decided = asked, decided
        self._files, self._exact = files, exact
        self._cached = sequence.length
        self._block = Block([], 0)
        self._row: npt.NDArray[np.float64] = np.empty(0)  # logprobs at the start of an answer
        self._scores: list[float] = []  # of labels of several tokens

    def next_block(self, max_rows: int | None = None) -> Block:
        """Return the next tokens of the input or of a question, or a label to score."""
        _, prompt, labels = self._asked[len(self._decided)]
        start, end = self.sequence.length, len(prompt)
        if start == end:
            label = labels[len(self._scores)]
            self._block = Block(label, len(label), prefill=True)
        else:
            # A block ends with the input: models with recurrent layers can rewind to it.
            stop = len(self.tokens) if start < len(self.tokens) else end
            tokens = prompt[start:stop][:max_rows]
            self._block = Block(tokens, int(start + len(tokens) == end), prefill=True)
        return self._block

    def accept(self, rows: StepResult, place: int) -> Step:
        """Take a block's rows. The step is empty: `result` holds the decisions."""
        logits, block = rows.logits[place], self._block
        question, prompt, labels = self._asked[len(self._decided)]
        if self.sequence.length == len(prompt):  # rows of a label: the next block overwrites them
            chain = [self._row, *map(_log_softmax, logits)]
            score = math.fsum(float(row[at]) for row, at in zip(chain, block.tokens, strict=False))
            if ends := [*self._files.stop_token_ids]:
                score += float(np.logaddexp.reduce(chain[-1][ends]))
            self._scores.append(score)
        else:
            self.sequence.commit(len(block.tokens))
            if block.rows and all(len(label) == 1 for label in labels):
                self._scores = [float(logits[0][token]) for (token,) in labels]
            elif block.rows:
                self._row = _log_softmax(logits[0])
        if len(self._scores) == len(labels):
            self._decided.append(Decision(question, _softmax(self._scores)))
            self._scores = []
            self.close()
        elif self.sequence.length == len(self.tokens):
            self.close()
        return Step(len(block.tokens))

    def finish(self) -> None:
        if len(self._decided) == len(self._asked):
            own = sum(len(one.prompt) - len(self.tokens) for one in self._asked)
            tokens, name = len(self.tokens) + own, self._files.name
            self.result = Decisions(self._decided, name, tokens, self._cached, self._exact())

    def close(self) -> None:
        """Rewind to the end of the input: the prefix cache takes the sequence as its KV."""
        self.sequence.rewind(min(len(self.tokens), self.sequence.length))


def shared_input(asked: Sequence[EncodedQuestion]) -> list[int]:
    """Return the common prefix of all prompts; each has at least one more token."""
    first = asked[0].prompt
    lengths = [common_prefix_length(first, one.prompt[:-1]) for one in asked]
    return first[: min(lengths)]


def _softmax(scores: Sequence[float]) -> list[float]:
    highest = max(scores)
    parts = [math.exp(score - highest) for score in scores]
    total = math.fsum(parts)
    return [part / total for part in parts]


def _log_softmax(row: Logits) -> npt.NDArray[np.float64]:
    wide = row.astype(np.float64)
    wide -= wide.max()
    return np.asarray(wide - np.log(np.exp(wide).sum()))
