"""A lock of which threads take turns, in the order in which they ask for it.

With a plain lock a thread that releases it and asks again at once, as a scheduler does between its
calls, nearly always gets it back before those that wait have woken.
"""

import threading
from collections import deque
from types import TracebackType


class Turns:
    """The lock. The thread that has it may take it again; it is released as often as it was taken.

    >>> turns = Turns()
    >>> with turns, turns:
    ...     turns.taken
    True
    """

    def __init__(self) -> None:
        self._guard = threading.RLock()  # a finalizer may take turns where one is being taken
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[tuple[int, threading.Lock]] = deque()

    @property
    def taken(self) -> bool:
        """Whether a thread has it now."""
        return self._owner is not None

    def __enter__(self) -> None:
        thread = threading.get_ident()
        with self._guard:
            if self._owner in (None, thread):
                self._owner = thread
                self._depth += 1
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append((thread, turn))
        try:
            turn.acquire()  # `__exit__` has made this thread the owner
        except BaseException:  # Ctrl-C
            with self._guard:
                if (thread, turn) in self._waiting:
                    self._waiting.remove((thread, turn))
                else:
                    self._release()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._guard:
            self._release()

    def _release(self) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._owner = None
        if self._waiting:
            self._owner, turn = self._waiting.popleft()
            self._depth = 1
            turn.release()
