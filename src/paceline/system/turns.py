"""A lock that threads get in the order in which they ask for it.

With a plain lock a thread that releases it and asks again at once, as a scheduler does between its
calls, nearly always gets it back before those that wait have woken.

What a finalizer has to do with the lock goes to `run_soon`: Python may run a finalizer in any
thread at any time, where waiting could be for ever, or in the middle of a turn.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable

from paceline.system.processes import use_native_threads

log = logging.getLogger(__name__)


class Turns:
    """The lock. The thread that has it may take it again; it is released as often as it was taken.

    Taking it raises PacelineError in a forked child, which lacks the threads of the model's engine.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._guard = threading.RLock()  # a finalizer may take turns where one is being taken
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[tuple[int, threading.Lock]] = deque()
        self._soon: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        if self._process != os.getpid():
            use_native_threads()
        thread = threading.get_ident()
        with self._guard:
            turn = None
            if self._owner in (None, thread):
                self._owner = thread
                self._depth += 1
            else:
                turn = threading.Lock()
                turn.acquire()
                self._waiting.append((thread, turn))
        if turn is not None:
            self._wait(thread, turn)
        if self._soon and self._depth == 1:
            self._run_waiting()

    def __exit__(self, *_: object) -> None:
        try:
            if self._soon and self._depth == 1:
                self._run_waiting()
        finally:
            with self._guard:
                self._release()

    def run_soon(self, call: Callable[[], None]) -> None:
        """Call with the lock: now if no thread has it, else at the beginning or end of a turn.

        Never in a forked child, whose engine nothing can use.
        """
        if self._process != os.getpid():
            return
        self._soon.append(call)
        with self._guard:
            if self._owner is not None:
                return
            self._owner, self._depth = threading.get_ident(), 1
        self.__exit__()

    def _run_waiting(self) -> None:
        while self._soon:
            try:
                self._soon.popleft()()
            except Exception:  # the turn is another's
                log.exception("a finalizer failed")

    def _wait(self, thread: int, turn: threading.Lock) -> None:
        try:
            turn.acquire()  # `__exit__` of another thread makes this one the owner
        except BaseException:  # Ctrl-C
            with self._guard:
                if (thread, turn) in self._waiting:
                    self._waiting.remove((thread, turn))
                else:
                    self._release()
            raise

    def _release(self) -> None:
        self._depth -= 1
        if self._depth:
            return
        # At no time without an owner while threads wait: a finalizer here would begin a turn.
        if self._waiting:
            self._owner, turn = self._waiting.popleft()
            self._depth = 1
            turn.release()
        else:
            self._owner = None
