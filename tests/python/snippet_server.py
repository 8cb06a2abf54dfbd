"""Runs Python snippets in children of a process that has imported torch and nothing else.

A child that crashes, hits a resource limit or leaves by `os._exit` takes no test with it, and starting
one costs a fork instead of an import of torch. Each child is a fresh interpreter as far as vtensor can
tell: vtensor is imported in the child only. Requests and answers are lines of JSON on stdin and stdout.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time


def _become_child(request: dict) -> dict:
    os.setpgid(0, 0)
    for stream, fd in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        opened = os.open(request[stream], os.O_RDWR)
        os.dup2(opened, fd)
        os.close(opened)
    os.chdir(request["cwd"])
    sys.argv = request["argv"]
    if request["environment"] is not None:
        os.environ.clear()
        os.environ.update(request["environment"])
    return request


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


def serve() -> dict | None:
    """Answers requests until stdin ends (None); in a child, the request it is to fulfil."""
    import numpy  # noqa: F401  (imported here once, so that children need not)
    import torch  # noqa: F401

    gc.collect()
    gc.freeze()  # collections in the children need not look at torch's own objects
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return _become_child(request)
        print(json.dumps({"code": _wait(pid, request["timeout"])}), flush=True)
    return None


if __name__ == "__main__":
    request = serve()
    if request is not None:
        finalize, code = request["finalize"], compile(request["code"], "<snippet>", "exec")
        # The child's own __main__: nothing of the server is left in it when the interpreter exits.
        exec(code, {"__name__": "__main__"})
        if not finalize:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
