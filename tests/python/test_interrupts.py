"""The harness that interrupts an operation before every bytecode: what it tries, and what it finds."""

from __future__ import annotations

import sys
import threading
from collections import Counter

import pytest

from interrupts import at_every_bytecode, moment, path, place

HERE = sys.modules[__name__]


class Account:
    """Keeps a balance twice."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.balance = self.copy = 0
        self.both = (0, 0)

    def add_in_two_steps(self, amount):
        self.balance += amount
        self.copy += amount

    def add_at_once(self, amount):
        with self.lock:
            self.both = (self.both[0] + amount, self.both[1] + amount)
            return self.both

    def add_often(self, amount):
        for _ in range(5):
            self.add_at_once(amount)

    def refuse_to_stop(self):
        try:
            self.add_at_once(1)
        except BaseException:
            pass


def no_check(account, outcome):
    pass


def test_a_change_in_two_steps_is_found_and_where():
    def check(account, outcome):
        assert account.balance == account.copy

    with pytest.raises(AssertionError) as failed:
        at_every_bytecode(Account, lambda a: a.add_in_two_steps(1), check, within=HERE)
    (note,) = failed.value.__notes__
    assert "add_in_two_steps" in note and "test_interrupts.py" in note


def test_a_change_at_once_holds_and_leaves_its_lock():
    """Each try begins anew; the last is not interrupted, and has a result."""
    seen = Counter()

    def check(account, outcome):
        assert account.lock.acquire(blocking=False)
        seen[account.both, outcome.interrupted, outcome.result] += 1

    tried = at_every_bytecode(Account, lambda a: a.add_at_once(1), check, within=HERE)
    before, after = (0, 0), (1, 1)
    assert seen[before, True, None] > 10 and seen[after, True, None] >= 1 and seen[after, False, after] == 1
    assert sum(seen.values()) == tried + 1


def test_what_is_tried_once():
    def places(operation, **options):
        return at_every_bytecode(Account, operation, no_check, within=HERE, **options)

    def once(a):
        a.add_at_once(1)

    def twice(a):
        a.add_at_once(1)
        a.add_at_once(1)

    def often(a):
        a.add_often(1)

    assert places(once, each=place) == places(once, each=path) == places(once, each=moment)
    assert places(twice, each=place) < places(twice, each=path) == places(twice, each=moment)
    assert places(often, each=place) == places(often, each=path) < places(often, each=moment)
    assert places(often, each=moment, stride=7) == places(often, each=moment) // 7
    assert places(often) == places(often)


def test_an_exception_that_is_caught_is_found():
    with pytest.raises(AssertionError, match="did not come out"):
        at_every_bytecode(Account, lambda a: a.refuse_to_stop(), no_check, within=HERE)
