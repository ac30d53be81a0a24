"""The lock of a model: threads take turns."""

import threading
import time
from collections import deque

import pytest

from paceline.system.turns import Turns
from support.waiting import PATIENCE, until


def test_a_thread_that_asks_again_at_once_gets_the_lock_after_those_that_wait():
    turns, order = Turns(), list[str]()

    def wait(name: str) -> None:
        with turns:
            order.append(name)

    threads = []
    with turns:
        for number in range(3):
            thread = threading.Thread(target=wait, args=(f"waiting {number}",))
            thread.start()
            until(lambda expected=number + 1: len(turns._waiting) == expected)
            threads.append(thread)
    with turns:
        order.append("again")
    for thread in threads:
        thread.join(PATIENCE)
    assert order == ["waiting 0", "waiting 1", "waiting 2", "again"]
    assert turns._owner is None


def test_one_thread_at_a_time_has_the_lock_however_often_it_takes_it():
    turns, inside, most = Turns(), [0], [0]

    def work() -> None:
        for _ in range(100):
            with turns, turns:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0)
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert most == [1]
    assert turns._owner is None


def test_an_error_in_a_turn_releases_the_lock():
    turns = Turns()
    with pytest.raises(ZeroDivisionError), turns, turns:
        _ = 1 / 0
    assert turns._owner is None


def test_what_runs_soon_runs_at_once_or_at_the_end_of_a_turn_and_never_waits():
    turns, order = Turns(), list[str]()
    turns.run_soon(lambda: order.append(f"at once, {turns._owner is not None}"))
    with turns:
        with turns:
            turns.run_soon(lambda: order.append(f"soon, {turns._owner is not None}"))
            thread = threading.Thread(target=turns.run_soon, args=(lambda: order.append("other"),))
            thread.start()
            thread.join(PATIENCE)
        order.append("in the turn")
    assert order == ["at once, True", "in the turn", "soon, True", "other"]
    assert turns._owner is None


def test_a_finalizer_while_the_lock_is_handed_on_wakes_no_second_thread():
    turns, inside, most = Turns(), [0], [0]
    finalizers = [lambda: turns.run_soon(lambda: None)]

    class Waiting(deque[tuple[int, threading.Lock]]):
        def __len__(self) -> int:
            if turns._depth == 0 and finalizers:
                finalizers.pop()()
            return super().__len__()

    def work() -> None:
        with turns:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.05)
            inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    with turns:
        for thread in threads:
            thread.start()
        until(lambda: len(turns._waiting) == 3)
        turns._waiting = Waiting(turns._waiting)
    for thread in threads:
        thread.join(PATIENCE)
    assert most == [1]
    assert turns._owner is None
