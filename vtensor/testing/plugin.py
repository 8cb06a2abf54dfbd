"""A pytest plugin with the fixture ``no_leaked_pages``: a test that leaks memory is an error. It also makes
:func:`vtensor.explain_faults` write past pytest's capture: if a fault ends the process, pytest loses what a
test has written to standard error.

In the ``conftest.py`` at the root of the tests::

    pytest_plugins = ["vtensor.testing.plugin"]

and for one test, a file or all of them::

    @pytest.mark.usefixtures("no_leaked_pages")      # a test or a class
    pytestmark = pytest.mark.usefixtures("no_leaked_pages")  # in a file
    usefixtures = no_leaked_pages                    # in pytest.ini or [tool.pytest.ini_options], for all

The package does not register it as an entry point. If it did, every run of pytest in an environment with
vtensor would import torch, which takes seconds.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

from vtensor._base.faults import explain_faults, reports_go_to
from vtensor.testing._leaks import Look

_failed = pytest.StashKey[bool]()
_stderr = pytest.StashKey[int]()
_before = pytest.StashKey[Any]()  # where reports of faults went


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_before] = reports_go_to()
    config.stash[_stderr] = os.dup(2)
    explain_faults(file=config.stash[_stderr])


def pytest_unconfigure(config: pytest.Config) -> None:
    before = config.stash[_before]
    explain_faults(before is not None, file=before)
    os.close(config.stash[_stderr])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call":
        as_expected = report.skipped and hasattr(report, "wasxfail")
        item.stash[_failed] = report.failed or as_expected
    return report


@pytest.fixture
def no_leaked_pages(request: pytest.FixtureRequest) -> Generator[None, None, None]:
    """Fails the test at its teardown if it leaves tensors, pages or addresses in any pool of the process.

    It checks after the teardown of the test's other fixtures. It ignores a test that failed, even as
    expected (``xfail``), because the traceback keeps the variables of its frames alive.
    """
    look = Look()
    yield
    if request.node.stash.get(_failed, True):
        return
    request.node.funcargs.clear()  # pytest would keep the fixtures' values until later
    left = look.leaks()
    if left:
        pytest.fail(f"[no_leaked_pages] {'; '.join(left)}", pytrace=False)
