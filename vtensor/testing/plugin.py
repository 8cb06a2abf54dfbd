"""A pytest plugin with one fixture, ``no_leaked_pages``: a test that leaves memory behind is an error.

In the ``conftest.py`` at the root of the tests::

    pytest_plugins = ["vtensor.testing.plugin"]

and for one test, a file or all of them::

    @pytest.mark.usefixtures("no_leaked_pages")      # a test or a class
    pytestmark = pytest.mark.usefixtures("no_leaked_pages")  # in a file
    usefixtures = no_leaked_pages                    # in pytest.ini or [tool.pytest.ini_options], for all

It is no entry point of the package, on purpose: pytest would import that, and torch with it, for seconds,
in every run in an environment where vtensor happens to be installed.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

from vtensor.testing._leaks import Look

_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call":
        item.stash[_failed] = report.failed
    return report


@pytest.fixture
def no_leaked_pages(request: pytest.FixtureRequest) -> Generator[None, None, None]:
    """Fails the test, at its teardown, where it leaves tensors, pages or addresses in any pool of the
    process.

    It looks after the test's other fixtures are gone. A test that failed is not looked at: its traceback
    holds what its frames name.
    """
    look = Look()
    yield
    if request.node.stash.get(_failed, True):
        return
    request.node.funcargs.clear()  # pytest would hold what fixtures returned until later
    left = look.leaks()
    if left:
        pytest.fail(f"[no_leaked_pages] {'; '.join(left)}", pytrace=False)
