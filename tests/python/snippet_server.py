"""Runs Python snippets in children of a process that has imported torch and nothing else.

A child that crashes, hits a resource limit or leaves by `os._exit` takes no test with it, and starting
one costs a fork instead of an import of torch. Each child is a fresh interpreter as far as vtensor can
tell: vtensor is imported in the child only. Requests and answers are lines of JSON on stdin and stdout.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time


def _become_child(request: dict) -> str:
    os.setpgid(0, 0)
    for stream, fd in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        opened = os.open(request[stream], os.O_RDWR)
        os.dup2(opened, fd)
        os.close(opened)
    os.environ.update(request["env"])
    return request["code"]


def _wait(pid: int, timeout: float) -> int | None:
    """The exit code (negative: the signal) or None where the child outlived `timeout` and was ended."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def serve() -> str | None:
    """Answers requests until stdin ends (None); in a child, the code it is to run."""
    import numpy  # noqa: F401  (imported here once, so that children need not)
    import torch  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return _become_child(request)
        print(json.dumps({"code": _wait(pid, request["timeout"])}), flush=True)
    return None


if __name__ == "__main__":
    snippet = serve()
    if snippet is not None:
        # The child's own __main__: nothing of the server is left in it when the interpreter exits.
        exec(compile(snippet, "<snippet>", "exec"), {"__name__": "__main__"})
