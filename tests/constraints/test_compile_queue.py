"""The queue of grammars, with a clock and a compiler that take no time: whose turn it is, for how
long, and what ends when nobody waits for it any more.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from paceline.constraints.compile_queue import Caller, CompileQueue
from paceline.errors import Busy, ModelError
from paceline.storage.processes import Interrupt, Interrupted
from support.errors import raises
from support.waiting import PATIENCE, until

TRIALS = 0.03, 0.2, 1.0
HARMFUL = [f"harmful {number}" for number in range(12)]


class Compiler:
    """Compiles in no time, on its own clock: harmful grammars take the whole trial, good 10 ms."""

    def __init__(self, trials: Sequence[float] = TRIALS) -> None:
        self.now = 0.0
        self.tried: list[tuple[str, float]] = []
        self.queue = CompileQueue(self.compile, lambda: trials)
        self.go = threading.Event()
        self._trials = trials
        self._callers: list[tuple[Caller, float, Future[str]]] = []
        self._pool = ThreadPoolExecutor(64)

    def compile(self, grammar: str, seconds: float, interrupt: Interrupt) -> str | None:
        assert self.go.wait(PATIENCE)
        self.tried.append((grammar, seconds))
        is_good = grammar.startswith("good")
        self.now += min(seconds, 0.01 if is_good else 9.9)
        for caller, deadline, future in self._callers:  # all whose time is up see that
            if self.now >= deadline:
                caller.wake()
                until(future.done)
        if interrupt.requested:
            raise Interrupted
        if is_good:
            return ""
        return "harmful" if seconds == self._trials[-1] else None

    def ask(self, grammar: str, client: str, seconds: float = 4.0) -> Future[str]:
        """Have a client wait for a grammar, behind all before it."""
        caller = Caller(client, seconds, lambda: self.now)
        waiting = self.waiting
        future = self._pool.submit(self.queue.compile, grammar, caller)
        self._callers.append((caller, self.now + seconds, future))
        until(lambda: self.waiting == waiting + 1)
        return future

    @property
    def waiting(self) -> int:
        return sum(len(job.callers) for job in [*self.queue._jobs.values()])


def refused(future: "Future[str]") -> bool:
    error = future.exception(PATIENCE)
    assert error is None or isinstance(error, Busy)
    return error is not None


def test_a_good_grammar_behind_harmful_ones_of_its_own_client_is_compiled_in_time():
    compiler = Compiler()
    harmful = [compiler.ask(grammar, "one") for grammar in HARMFUL]
    good = compiler.ask("good", "one")
    compiler.go.set()
    assert good.result(PATIENCE) == ""
    at = compiler.tried.index(("good", TRIALS[0]))
    assert all(seconds == TRIALS[0] for _, seconds in compiler.tried[:at]), (
        "a long trial came first"
    )
    assert {refused(item) or item.result() for item in harmful} == {True, "harmful"}


def test_without_a_short_trial_it_would_be_refused():
    compiler = Compiler(trials=(1.0,))
    for grammar in HARMFUL:
        compiler.ask(grammar, "one")
    good = compiler.ask("good", "one")
    compiler.go.set()
    assert refused(good)


def test_everyone_has_an_answer_or_a_refusal_when_the_time_is_up():
    compiler = Compiler()
    harmful = [compiler.ask(grammar, "one") for grammar in HARMFUL]
    compiler.go.set()
    answers = ["busy" if refused(item) else item.result() for item in harmful]
    assert set(answers) == {"busy", "harmful"}
    until(lambda: compiler.queue._thread is None)
    assert compiler.now < 4.0 + TRIALS[-1], "compiled what nobody waits for"


def test_clients_take_turns_so_that_one_with_few_grammars_waits_for_one_of_each_other():
    compiler = Compiler()
    for number in range(30):
        compiler.ask(f"harmful {number}", "many")
    few = [compiler.ask(f"{kind} of few", "few") for kind in ("good", "slow", "good 2")]
    compiler.go.set()
    assert [item.result(PATIENCE) for item in few] == ["", "harmful", ""]
    whose = ["few" if "few" in grammar else "many" for grammar, _ in compiler.tried]
    mine = [at for at, who in enumerate(whose) if who == "few"]
    assert mine[:5] == [1, 3, 5, 7, 9], "after the first, which came to an empty queue, by turns"


def test_what_the_last_caller_leaves_is_interrupted_and_what_another_waits_for_is_not():
    began, over = threading.Event(), threading.Event()
    interrupts = list[Interrupt]()

    def compile_(grammar: str, seconds: float, interrupt: Interrupt) -> str:
        interrupts.append(interrupt)
        began.set()
        until(lambda: over.is_set() or interrupt.requested)
        if interrupt.requested:
            raise Interrupted
        return grammar

    queue = CompileQueue(compile_, lambda: TRIALS)
    callers = Caller("one"), Caller("two"), Caller("three")
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(queue.compile, "the same", caller) for caller in callers[:2]]
        until(lambda: sum(len(job.callers) for job in queue._jobs.values()) == 2)
        assert began.wait(PATIENCE)
        callers[0].leave()
        assert refused(futures[0])
        assert not interrupts[0].requested
        callers[1].leave()
        assert refused(futures[1])
        assert interrupts[0].requested
        third = pool.submit(queue.compile, "the same", callers[2])  # from the beginning
        until(lambda: len(interrupts) == 2)
        over.set()
        assert third.result(PATIENCE) == "the same"


def test_an_error_that_is_not_of_the_grammar_reaches_all_who_wait():
    over = threading.Event()

    def compile_(*_: object) -> str:
        assert over.wait(PATIENCE)
        raise ModelError("no process can be started")

    queue = CompileQueue(compile_, lambda: TRIALS)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(queue.compile, "any", Caller(client)) for client in "ab"]
        until(lambda: sum(len(job.callers) for job in queue._jobs.values()) == 2)
        over.set()
        for future in futures:
            with raises(ModelError, "process"):
                future.result(PATIENCE)
