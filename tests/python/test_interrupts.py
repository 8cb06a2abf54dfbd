"""The harness that interrupts an operation before every bytecode: what it tries, and what it finds."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter

import pytest

from interrupts import Interrupt, at_every_bytecode, moment, path, place

HERE = sys.modules[__name__]


class Account:
    """Keeps a balance twice."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.balance = self.copy = 0
        self.both = (0, 0)
        self.letters = ["a bill"]

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

    def take_letters(self):
        letters = self.letters
        self.letters = []
        return letters

    def fail_in_three_ways(self):
        for error in (KeyError, OSError, TypeError):
            try:
                raise error
            except KeyError:
                self.balance += 1
            except OSError as caught:
                self.letters.append(str(caught))
        return self.balance

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


def test_what_is_handed_over_by_a_return_is_here_or_there():
    def check(account, outcome):
        assert (outcome.result == ["a bill"]) != (account.letters == ["a bill"])

    assert at_every_bytecode(Account, lambda a: a.take_letters(), check, within=HERE) > 5


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


def test_nothing_stays_handled():
    def check(account, outcome):
        assert sys.exception() is None

    def operation(account):
        with contextlib.suppress(TypeError):
            account.fail_in_three_ways()

    assert at_every_bytecode(Account, operation, check, within=HERE, each=moment) > 30


def test_there_is_a_bound_and_the_tracing_ends():
    before = sys.gettrace()
    with pytest.raises(AssertionError, match="more than 5 places"):
        at_every_bytecode(Account, lambda a: a.add_often(1), no_check, within=HERE, most=5)
    assert sys.gettrace() is before
    assert not issubclass(Interrupt, Exception)
