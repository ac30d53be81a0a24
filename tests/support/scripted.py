"""A model with scripted responses: rules map prompts to texts.

It computes nothing, so its context may be as long as an agent's prompts are. What is tested with it
is everything around the model: templates, grammars, parsers, and the forms of the APIs.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.decoding.costs import CostTable
from paceline.decoding.types import Block
from paceline.models import resolve
from paceline.runtime.model import Model
from paceline.server.http import Reply
from support.costs import give_costs
from support.server import Running
from support.thinking import CLOSE, OPEN, write_thinking
from support.toy import ToyEngine, ToySequence
from support.waiting import PATIENCE

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n<tools>\n{% for tool in tools %}{{ tool | tojson }}\n"
    "{% endfor %}</tools>\nTo call a function:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
    "{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content is string %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and "
    "enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Hermes' calls and Qwen3's thoughts; every message keeps its thoughts."""

COSTS = CostTable({1: 1e-3, 32: 2e-3})
END = 2

Rule = Callable[[str], str | None]
"""The answer to a prompt; None: the rule is not for this prompt."""


class ScriptedEngine(ToyEngine):
    """An engine whose rows pick the token of the prompt's script at their position."""

    def __init__(self, context_length: int) -> None:
        """Start without rules: every answer is empty."""
        blocks = 4 * context_length // 8
        super().__init__(vocab_size=320, context_length=context_length, cache_blocks=blocks)
        self.rules: Sequence[Rule] = ()
        self.script: list[int] | None = None
        """The tokens of every answer, in place of the rules."""
        self.prompts: list[str] = []
        """The prompts of all answers so far."""
        self.encode: Callable[[str], list[int]] = lambda _: []
        self.decode: Callable[[list[int]], str] = lambda _: ""
        self._started: dict[int, tuple[int, list[int]]] = {}

    def _read(self, table: ToySequence, block: Block) -> np.ndarray:
        end = table.length + len(block.tokens)
        if block.prefill:
            prompt = self.decode(table.values[:end].tolist())
            self.prompts.append(prompt)
            answers = (rule(prompt) for rule in self.rules)
            answer = next((text for text in answers if text is not None), "")
            self._started[id(table)] = end, self.script or self.tokens(answer)
        start, script = self._started[id(table)]
        rows = np.zeros((block.rows, self.vocab_size), np.float32)
        for row in range(block.rows):
            place = end - block.rows + row + 1 - start
            rows[row, script[place] if 0 <= place < len(script) else END] = 20
        return rows

    def tokens(self, answer: str) -> list[int]:
        """An answer's tokens; a thought is between `<think>` and `</think>`."""
        thought, closed, rest = answer.partition("</think>")
        if not closed:
            return self.encode(answer)
        inner = self.encode(thought.removeprefix("<think>"))
        return [OPEN, *inner, CLOSE, *self.encode(rest)]


def scripted_model(
    folder: Path, cache: Path, context_length: int = 1024, template: str = TEMPLATE
) -> Model:
    """A model that is scripted; its engine is a `ScriptedEngine`."""
    path = write_thinking(folder / "scripted.gguf", template)
    files = resolve(str(path), cache)
    engine = ScriptedEngine(context_length)
    tokenizer = files.tokenizer
    engine.encode = tokenizer.encode
    engine.decode = tokenizer.decode
    model = Model(files, engine)
    give_costs(model, COSTS)
    return model


def called(name: str, arguments: dict[str, Any]) -> str:
    """The text of a call."""
    inner = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{inner}\n</tool_call>"


def always(answer: str) -> Rule:
    """The rule of one answer to every prompt."""
    return lambda _: answer


def when(words: str, answer: str) -> Rule:
    """The rule of an answer to prompts with `words`."""
    return lambda prompt: answer if words in prompt else None


THOUGHT, SAID, DONE = "I should look.", "Let me see.", "There are 4 files."
CALL = called("ls", {"path": "."})


@contextmanager
def calling_ls(server: Running) -> Iterator[Running]:
    """Script a reasoning model that writes text, calls `ls`, and responds to its result."""
    engine_of(server).rules = [
        when("4 files here", DONE),
        always(f"<think>\n{THOUGHT}\n</think>\n\n{SAID}\n{CALL}"),
    ]
    yield server
    server.rest()


def prompt_of(server: Running) -> str:
    """The last prompt; decoding leaves the marks of turns and thoughts out."""
    return engine_of(server).prompts[-1]


def engine_of(server: Running) -> ScriptedEngine:
    """The engine of a server whose model is scripted."""
    engine = server.model.engine
    assert isinstance(engine, ScriptedEngine)
    return engine


def fails_in_its_stream(server: Running, patch: pytest.MonkeyPatch) -> None:
    """The engine fails, once, after the stream of the next request has begun."""
    step, open_stream = server.model.engine.step, Reply.open_stream
    begun, failed = threading.Event(), threading.Event()

    async def opening(reply: Reply) -> None:
        await open_stream(reply)
        begun.set()

    def fails(work: Any) -> Any:
        if any(not block.prefill for _, block in work) and not failed.is_set():
            assert begun.wait(PATIENCE)
            failed.set()
            raise RuntimeError("secret")
        return step(work)

    patch.setattr(Reply, "open_stream", opening)
    patch.setattr(server.model.engine, "step", fails)
