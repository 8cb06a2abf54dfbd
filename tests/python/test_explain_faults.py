"""What explain_faults says of addresses without memory, and that the process ends as it would have."""

from __future__ import annotations

import functools
import re
import signal
from fnmatch import fnmatchcase

import pytest

import vtensor
from cuda_support import needs_simcuda
from support import Finished, run_program, run_snippet

CACHE = """
pool = vtensor.Pool("cpu", page_size=4096, budget="64MiB")
cache = vtensor.KVCache(2, 2, 32, 4, 1024, torch.float32, pool=pool)  # 256 bytes a token
slot = cache.alloc()
def has(length):
    lengths = cache.lengths
    lengths[slot] = length
    assert cache.step(lengths)
def at(tensor):
    print(hex(tensor.data_ptr()), flush=True)
"""


def report_of(finished: Finished, name: str = "SIGSEGV") -> list[str]:
    """Both lines of the report of a snippet that a fault ended, without their beginning."""
    assert finished.code == -getattr(signal, name), finished
    lines = [line for line in finished.err.splitlines() if line.startswith("vtensor: ")]
    assert len(lines) == 2, finished.err
    found = re.fullmatch(rf"vtensor: {name} at 0x[0-9a-f]+, (.*)", lines[0])
    assert found is not None, lines[0]
    return [found[1], lines[1].removeprefix("vtensor: ")]


# A child for each case, forked before there is a pool.
_FORKED = """
for case in {cases!r}:
    for stream in (sys.stdout, sys.stderr):
        print("case:", case, file=stream, flush=True)
    pid = os.fork()
    if not pid:
        exec({setup!r} + case.split(" -> ")[0])
        os._exit(0)
    print("ended:", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@functools.cache
def run_forked(setup: str, cases: tuple[str, ...]) -> dict[str, Finished]:
    """How each case ended, up to its first arrow, as a child of one process."""
    together = run_snippet(_FORKED.format(setup=setup, cases=cases), timeout=100).check()
    outs, errs = (text.split("case: ")[1:] for text in (together.out, together.err))
    found = {}
    for case, out, err in zip(cases, outs, errs, strict=True):
        out, code = out.removeprefix(case).split("ended: ")
        found[case] = Finished(int(code), out, err)
    return found


def cases(table: str) -> tuple[str, ...]:
    """Of each: what is done, what is named, and why."""
    return tuple(" ".join(case.split()) for case in re.split(r"\n(?=\S)", table.strip()))


NO_PAGE = cases("""
cache[0][0][slot, :100] = 1
    -> 0 -> the slot has 0 tokens: call step() first, with a length of at least 1
cache[0][0][slot, 7] = 1
    -> 7 -> the slot has 0 tokens: call step() first, with a length of at least 8
has(100); cache[0][0][slot, :200] = 1
    -> 112 -> the slot has 100 tokens: call step() first
has(100); cache.truncate(slot, 20); pool.wait_idle(); cache[0][0][slot, :100] = 1
    -> 32 -> the slot has 20 tokens: call step() first
has(100); cache.swap_out(slot); cache.wait(slot); cache[0][0][slot, :100] = 1
    -> 0 -> the slot is swapped out: call swap_in() first
has(100); cache.swap_out(slot); assert cache.swap_in(slot); cache.wait(slot); cache[0][0][slot, :200] = 1
    -> 112 -> the slot has 100 tokens: call step() first
has(100); cache.free(slot); pool.trim(); cache[0][0][slot, :100] = 1
    -> 0 -> the slot is free: alloc() names the slots in use
k = cache[0][0]; cache.close(); k[slot, :100] = 1
    -> 0 -> the cache is closed: make a new one
cache[0][0][slot, 1023] = 1
    -> 1023 -> the slot has 0 tokens: call step() first
""")


BANDED = """
cache = vtensor.KVCache(2, 2, 16, max_batch=2, max_len=8192, dtype=torch.float32, bands=2)
slot = cache.alloc()
cache.step([10, 0])
print(hex(cache[1][0].data_ptr()), flush=True)
def write(token):
    cache.wait(slot)
    cache[1][0][slot, token] = 1
"""


IN_A_BAND = cases("""
cache.swap_out(slot, bands=[1]); write(3)
    -> 3 -> band 1 of the slot is swapped out: call swap_in()
cache.step([20, 0], bands=[1]); write(4000)
    -> 4000 -> the slot has 20 tokens: call step() first
cache.step([20, 0], bands=[1]); cache.step([30, 0]); write(4000)
    -> 4000 -> the slot has 30 tokens: call step() first
cache.swap_out(slot, bands=[1]); cache.swap_in(slot, bands=[1]); write(4000)
    -> 4000 -> the slot has 10 tokens: call step() first
""")


TENSOR = """
pool = vtensor.Pool("cpu", page_size=4096, budget="64MiB", prefetch=0)
def rows(length, capacity=1000):
    return vtensor.zeros(length, 256, grow_dim=0, capacity=capacity, dtype=torch.float32, pool=pool)
def at(t):
    print(hex(t.data_ptr()), flush=True)
def poke(t, position, row=0):
    ctypes.memset(t.data_ptr() + row * t.stride(0) * t.element_size() + position * 1024, 1, 1)
"""


PAST_PAGES = cases("""
t = rows(10); at(t); poke(t, 12)
    -> position 12 -> the tensor has 10 positions: call extend() first
t = rows(10); t.extend(1); at(t); poke(t, 12)
    -> position 12 -> the tensor has 11 positions: call extend() first
t = rows(10); t.extend(20); at(t); poke(t, 40)
    -> position 40 -> the tensor has 30 positions: call extend() first
t = rows(30); t.shrink(20); at(t); poke(t, 20)
    -> position 20 -> the tensor has 10 positions: call extend() first
t = rows(30); t.shrink(9, front=True); at(t); poke(t, 30)
    -> position 30 -> the tensor has 21 positions: call extend() first
t = rows(30); t.shrink(9, front=True); at(t); poke(t, -5)
    -> memory before the first position -> positions at the front were given back: keep a view
t = rows(9); f = t.fork(); at(f); poke(f, 13)
    -> position 13 -> the tensor has 9 positions: call extend() first
t = rows(9); at(t); a = t.data_ptr(); pool.sleep(contents="discard"); ctypes.memset(a, 1, 1)
    -> position 0 -> it is asleep: call wake() of its pool first
t = rows(9); at(t); pool.sleep(contents="discard"); pool.wake(); poke(t, 12)
    -> position 12 -> the tensor has 9 positions: call extend() first
t = rows(9, 90); at(t); poke(t, 91)
    -> position 91 -> the tensor's capacity ends before: check what computed the address
t = rows(9); v = t[:1]; at(v); a = t.data_ptr(); t.close(); ctypes.memset(a + 90000, 1, 1)
    -> position 87 -> the tensor is closed: keep an alias() of what is needed longer
""")


# The setup, what is named, and the cases.
TABLES = {
    "slot": (
        CACHE + "at(cache[0][0])\n",
        "K of layer 0, slot 0, token {} of the KVCache of 4 slots of 1024 tokens with cache[0][0] at {}",
        NO_PAGE,
    ),
    "band": (
        BANDED,
        "K of layer 1, slot 0, token {} of the KVCache of 2 slots of 8192 tokens with cache[1][0] at {}",
        IN_A_BAND,
    ),
    "tensor": (TENSOR, "{} of the VTensor at {}", PAST_PAGES),
}


@pytest.mark.parametrize(
    ("table", "case"), [(table, case) for table, (*_, cases) in TABLES.items() for case in cases]
)
def test_what_was_written_to_is_named_and_why_it_has_no_page(table: str, case: str) -> None:
    setup, name, all_of_it = TABLES[table]
    finished = run_forked(setup, all_of_it)[case]
    _, place, why = case.split(" -> ")
    named, reason = report_of(finished)
    assert named == "a write to " + name.format(place, finished.out.strip())
    assert re.match(rf"no page is (ever )?mapped there, because {re.escape(why)}", reason)


# Options, layer, whether V, slot, head, and token.
LAYOUTS: list[tuple[dict[str, object], int, bool, int, int | None, int]] = [
    ({}, 5, True, 3, None, 1000),
    ({"layer_group": 4}, 3, False, 2, None, 17),
    ({"layer_group": 4}, 5, True, 1, None, 600),
    ({"layout": "HND"}, 2, True, 3, 1, 999),
    ({"layout": "HND", "layer_group": 3, "value_head_dim": 16}, 4, True, 2, 2, 513),
    ({"layout": "HND", "layer_group": 2, "windows": [None, 64] * 3}, 3, False, 1, 0, 700),
    ({"value_head_dim": 0}, 1, False, 0, None, 1023),
]


def write_in(options: dict[str, object], layer: int, values: bool, *place: int | None) -> str:
    slot, head, token = place
    return f"""
pool = vtensor.Pool("cpu", page_size=4096, budget="64MiB")
cache = vtensor.KVCache(6, 3, 32, max_batch=4, max_len=1024, pool=pool, **{options!r})
tensor = cache[{layer}][{int(values)}]
print(hex(tensor.data_ptr()), flush=True)
tensor[{(slot, token) if head is None else (slot, head, token)!r}] = 1
"""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layer_head_slot_and_token_are_those_of_every_layout(layout) -> None:
    finished = run_forked("", tuple(write_in(*each) for each in LAYOUTS))[write_in(*layout)]
    _, layer, values, slot, head, token = layout
    of_head = "" if head is None else f", head {head}"
    assert report_of(finished)[0] == (
        f"a write to {'V' if values else 'K'} of layer {layer}{of_head}, slot {slot}, token {token} of the "
        f"KVCache of 4 slots of 1024 tokens with cache[{layer}][{int(values)}] at {finished.out.strip()}"
    )


# What is done, the report's first line, and its second.
OTHERS = {
    "what a window gave back": (
        """
pool = vtensor.Pool("cpu", page_size=4096, budget="64MiB")
cache = vtensor.KVCache(2, 2, 32, 4, 1024, torch.float32, windows=[None, 32], pool=pool)
slot = cache.alloc()
for length in range(50, 500, 50):
    assert cache.step([length, 0, 0, 0])
pool.wait_idle()
cache[0][0][slot, 3] = 1
cache[1][0][slot, 3] = 1
""",
        "a write to K of layer 1, slot 0, token 3 of *",
        "no page is mapped there, because the layer's window of 32 has given back what is before token 419: "
        "write what the window can still see",
    ),
    "between rows, through a view's storage": (
        TENSOR
        + """
t = vtensor.zeros(3, 6, 256, grow_dim=1, capacity=1000, dtype=torch.float32, pool=pool)
at(t)
torch.set_num_threads(1)
t[2:].untyped_storage().fill_(1)
""",
        "a write to position 8 of row 0 of the VTensor at {at}",
        "no page is mapped there, because the tensor has 6 positions: call extend() first",
    ),
    "of a cached tensor's new owner": (
        """
pool = vtensor.Pool("cpu", page_size=4096, budget="64MiB")
def rows(length):
    return vtensor.zeros(length, 256, grow_dim=0, capacity=1000, dtype=torch.float32, pool=pool)
t = rows(30)
address = t.data_ptr()
t.close()
pool.wait_idle()
t = rows(0)
assert t.address == address and pool.stats().tensors_reused == 1
ctypes.memset(address + 900 * 1024, 1, 1)
""",
        "a write to position 900 of the VTensor at *",
        "no page is mapped there, because the tensor has 0 positions:*",
    ),
    "an arena": (
        """
pool = vtensor.Pool("cpu", page_size=4096)
arena = vtensor.Arena(1 << 20, pool=pool)
print(hex(arena.tensor.data_ptr()), flush=True)
arena.map([(0, 4096), (8192, 12288)])
assert not arena.tensor[5000]  # reads as zeros
arena.tensor[:4096] = 1
arena.tensor[9000] = 1
arena.tensor[5000] = 1
""",
        "a write to byte 5000 of the arena of 1048576 bytes at {at}",
        "no page is mapped there, because nothing that map() was given, and unmap() was not, has that byte: "
        "map it first",
    ),
    "adopted memory": (  # is no Arena's
        """
pool = vtensor.Pool("cpu", page_size=4096)
module = torch.nn.Linear(32, 32)
vtensor.adopt(module, pool)
ctypes.memset(module.weight.data_ptr() + 8 * 4096, 1, 1)
""",
        "a write to byte * of the memory for vtensor.adopt and vtensor.memory of * bytes at 0x*",
        "no page is mapped there, because what was allocated there has been freed",
    ),
    "a strict hole": (
        """
pool = testing.host_pool(page_size=4096, budget=1 << 20)
t = vtensor.zeros(4, 1024, grow_dim=0, capacity=64, dtype=torch.float32, pool=pool)
ctypes.string_at(t.data_ptr() + 4 * 4096, 1)
""",
        "a read to position 4 of the VTensor*",
        "*",
    ),
    "a simulated device": (
        """
pool = testing.simulated_cuda_pool(simcuda_library())
t = vtensor.zeros(4, 1024, grow_dim=0, capacity=64, dtype=torch.float32, pool=pool)
f = t.fork()
ctypes.memset(t.data_ptr() + 4096, 1, 1)
""",
        "a write to position 1 of the VTensor*",
        "*the tensor has 4 positions now, so a page is there*call unshare()*",
    ),
    "memory that the system cannot give": (
        CACHE
        + """
has(100)
for fd in range(100):
    link = f"/proc/self/fd/{fd}"
    if os.path.islink(link) and "memfd:vtensor" in os.readlink(link):
        os.ftruncate(fd, 0)
cache[0][0][slot, 7] = 1
""",
        "a write to K of layer 0, slot 0, token 7 of the KVCache*",
        "a page is mapped there, but the system could not give its memory*",
    ),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=needs_simcuda if "device" in case else ()) for case in OTHERS]
)
def test_what_else_has_no_page_is_named_too(case: str) -> None:
    code, named, why = OTHERS[case]
    finished = run_forked("", tuple(code for code, *_ in OTHERS.values()))[code]
    found = report_of(finished, "SIGBUS" if "system" in case else "SIGSEGV")
    assert fnmatchcase(found[0], named.format(at=finished.out.strip())), found
    assert fnmatchcase(found[1], why), found


# -- beside other handlers


def test_faulthandler_speaks_too_whether_it_came_before_or_after() -> None:
    fault = CACHE + "cache[0][0][slot, 7] = 1"
    before = run_snippet(fault)  # the snippet enables it before vtensor is imported
    after = run_snippet(
        "faulthandler.disable(); testing.explain_faults(False)\n"
        "testing.explain_faults(); faulthandler.enable()\n" + fault
    )
    again = run_snippet("testing.explain_faults()\n" + fault)
    for finished in (before, after, again):
        report_of(finished)
        assert finished.err.count("Fatal Python error: Segmentation fault") == 1
        assert '"<snippet>", line' in finished.err
    assert before.err.index("vtensor: ") < before.err.index("Fatal Python")
    assert after.err.index("Fatal Python") < after.err.index("vtensor: ")


def test_off_unless_asked_for() -> None:
    code = """
import vtensor, sys
cache = vtensor.KVCache(1, 1, 8, 1, 1024)
if sys.argv[1] != "off": vtensor.explain_faults()
if sys.argv[1] == "off again": vtensor.explain_faults(False)
cache[0][0][0, :] = 1
"""
    for argument in ("off", "on", "off again"):
        ended = run_program(code, argument)
        assert ended.code == -signal.SIGSEGV
        assert ("vtensor: SIGSEGV" in ended.err) == (argument == "on")


def test_reports_go_to_the_file_that_was_named(tmp_path) -> None:
    for named in ("file", "file.fileno()"):
        path = tmp_path / "reports"
        finished = run_snippet(
            CACHE
            + f"""
file = open({str(path)!r}, "w")
vtensor.explain_faults(file={named})
if {named!r} == "file":
    del file
    gc.collect()
cache[0][0][slot, 7] = 1
"""
        )
        assert "vtensor: " not in finished.err
        report_of(Finished(finished.code, "", path.read_text()))


PLUGIN = """
from types import SimpleNamespace
import pytest
from vtensor.testing import plugin
vtensor.explain_faults(on, file=file)
config = SimpleNamespace(stash=pytest.Stash())
plugin.pytest_configure(config)
plugin.pytest_unconfigure(config)
"""


@pytest.mark.parametrize(
    ("on", "then"),
    [(True, "import vtensor.testing"), (True, PLUGIN), (False, PLUGIN)],
    ids=["import", "plugin", "plugin_off"],
)
def test_tools_for_tests_leave_reports_where_they_go(tmp_path, on, then) -> None:
    path = tmp_path / "reports"
    code = f"""
import sys, vtensor
on, file = {on}, open(sys.argv[1], "w")
vtensor.explain_faults(on, file=file)
{then}
vtensor.KVCache(1, 1, 8, 1, 1024)[0][0][0, :] = 1
"""
    finished = run_program(code, path)
    assert finished.code == -signal.SIGSEGV and "vtensor: SIGSEGV" not in finished.err
    assert ("vtensor: SIGSEGV" in path.read_text()) == on


def test_files_without_a_descriptor_are_refused() -> None:
    import io

    closed = open("/dev/null")
    closed.close()
    with open("/dev/null") as read_only:
        for file in (io.StringIO(), closed, "stderr", -1, 1.5, read_only, read_only.fileno(), 2**31 - 1):
            with pytest.raises(vtensor.InvalidArgument, match=r"^\[explain_faults\] file is .*: (give|open)"):
                vtensor.explain_faults(file=file)
