"""How tensors, pools and caches show themselves in a notebook."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
import torch

import vtensor
from kv_support import grown, make_cache
from support import calls, filled, mapper_calls
from vtensor._pictures import pages

SVG = "{http://www.w3.org/2000/svg}"


def parsed(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html)  # well formed, so that any viewer takes it


def strips(html: str) -> list[ElementTree.Element]:
    return list(parsed(html).iter(f"{SVG}svg"))


def runs(strip: ElementTree.Element) -> list[str]:
    return [rect.findtext(f"{SVG}title") for rect in strip.iter(f"{SVG}rect") if len(rect)]


def words(html: str) -> str:
    """What is left for a reader whose viewer drops pictures and styles."""
    root = parsed(html)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in ("style", f"{SVG}svg"):
                parent.remove(child)
    return " ".join(" ".join(root.itertext()).split())


def test_a_tensor_shows_its_pages(pool):
    t = filled(pool, 10, capacity=64)  # 2.5 of 16 pages
    (strip,) = strips(t._repr_html_())
    assert runs(strip) == [
        "pages 0 to 2: mapped",
        "pages 3 to 7: reserved",
        "pages 8 to 15: reserved, not to scale",
    ]
    boxes = list(strip.iter(f"{SVG}rect"))
    mapped, reserved = (float(box.get("width")) for box in boxes[:2])
    assert mapped / reserved == pytest.approx(3 / 5, rel=0.01)
    text = words(t._repr_html_())
    assert "VTensor [10, 1024] uint8 on cpu" in text
    assert "10 of 64 positions along dim 0, 10 KiB of data, 12 KiB mapped in pages of 4 KiB" in text
    assert "64 KiB of addresses" in text and "mapped 3" in text and "reserved 13" in text


def test_every_state_is_named_and_drawn(host):
    t = filled(host, 16)
    view = t[:]
    fork = t.fork()
    t[4] = 9
    t.truncate(12)
    (strip,) = strips(t._repr_html_())
    assert runs(strip)[:4] == ["page 0: shared", "page 1: private", "page 2: shared", "page 3: pinned"]
    assert strip.get("aria-label").startswith(
        "pages shared 0 to 0, private 1 to 1, shared 2 to 2, pinned 3 to 3"
    )
    assert strip.get("role") == "img" and strip.findtext(f"{SVG}title") == strip.get("aria-label")
    for state in ("shared 2", "private 1", "pinned 1"):
        assert state in words(t._repr_html_())
    fork.close()
    del view


def test_pages_ahead_are_shown(pool_factory, kind):
    pool = pool_factory(kind, prefetch=64 * 4096)
    t = filled(pool, 4)
    t.prepare(8)
    pool.wait_idle()
    assert runs(strips(t._repr_html_())[0])[:2] == ["page 0: mapped", "pages 1 to 2: prefetched"]
    assert "prefetched 2" in words(t._repr_html_()) and "prefetched 2" in words(pool._repr_html_())


def test_rows_alike_are_one_strip(pool):
    t = filled(pool, 4, rows=(6,), capacity=8)
    assert len(strips(t._repr_html_())) == 1
    assert "rows 0 to 5, alike" in words(t._repr_html_())
    assert "mapped 6" in words(t._repr_html_())
    t.reindex([0, 1, 2, 0, 4, 5])
    assert len(strips(t._repr_html_())) == 4
    assert "row 3" in words(t._repr_html_())


def test_the_closed_say_so(pool_factory, kind):
    pool = pool_factory(kind)
    t = filled(pool, 4)
    t.close()
    assert words(t._repr_html_()) == "VTensor, closed its pages and addresses were given back"
    assert t._repr_mimebundle_()["text/plain"].startswith("<VTensor, closed")
    pool.close()
    assert "closed" in words(pool._repr_html_())


def test_a_pool_shows_its_budget_and_its_pages(pool):
    t = filled(pool, 8)
    fork = t.fork()
    budget, mapped = strips(pool._repr_html_())
    assert budget.get("aria-label").startswith("memory, of the budget: 2 used, ")
    assert mapped.get("aria-label").endswith("4 active, 0 prefetched, 0 cached, 0 pinned, of 4 pages")
    assert "8 KiB of 256 KiB used in pages of 4 KiB, open tensors: 2" in words(pool._repr_html_())
    used = next(rect for rect in budget.iter(f"{SVG}rect") if rect.findtext(f"{SVG}title"))
    assert float(used.get("width")) == pytest.approx(720 * 2 / 64, abs=0.1)
    fork.close()


def test_an_arena_shows_its_range_in_lines(pool):
    page = pool.page_size
    with vtensor.Arena(80 * page, pool=pool) as arena:
        arena.map([(0, page), (35 * page, 37 * page)])
        html = arena._repr_mimebundle_()["text/html"]
        labels = [strip.get("aria-label") for strip in strips(html)]
        assert labels[0].startswith("line 0: pages mapped 0 to 0, reserved 1 to ")
        assert labels[2].startswith("line 3: pages reserved 0 to 4, mapped 5 to 6")
        assert len(labels) == 4 and labels[1].startswith("lines 1 to 2, alike: pages reserved")
        assert "12 KiB mapped of 320 KiB of addresses, in pages of 4 KiB" in words(html)
        assert "mapped 3" in words(html)
    assert words(arena._repr_mimebundle_()["text/html"]).startswith("vtensor.Arena, closed")


def test_a_cache_shows_its_slots(pool_factory):
    cache = make_cache(pool_factory("host", pages=64))
    for slot, length in enumerate((20, 5)):
        assert cache.alloc() == slot and grown(cache, slot, length)
    cache.fork(0)
    html = cache._repr_mimebundle_()["text/html"]
    assert [strip.get("aria-label") for strip in strips(html)] == [
        "pages in use: 4 of one slot, 8 shared, 0 cached, of 12 pages",
        "slot 0: 20 tokens, 2 pages deep",
        "slot 1: 5 tokens, 1 pages deep",
        "slot 2: 20 tokens, 2 pages deep",
    ]
    assert "45 tokens in 3 of 6 slots" in words(html)
    cache.swap_out(1)
    assert "40 tokens in 2 of 6 slots" in words(cache._repr_html_())
    assert "2 of 6 slots in use" in repr(cache)
    cache.close()
    assert words(cache._repr_html_()).startswith("vtensor.KVCache, closed")


def test_a_large_tensor_stays_a_small_picture(pool_factory):
    pool = pool_factory("host", pages=20_000)
    t = filled(pool, 4 * 4_000, capacity=4 * 20_000)
    fork = t.fork()
    t[:: 4 * 7] = 2  # every seventh page becomes private
    html = t._repr_html_()
    assert len(html) < 40_000 and len(runs(strips(html)[0])) <= 241
    assert "private 572" in words(html)
    fork.close()


def test_too_many_pages_are_not_looked_at_one_by_one(pool, monkeypatch):
    monkeypatch.setattr(pages, "MOST_RECORDS", 4)
    t = filled(pool, 30, rows=(2,), capacity=64)
    monkeypatch.setattr(vtensor.VTensor, "pages", lambda self: pytest.fail("asked for every page"))
    (strip,) = strips(t._repr_html_())
    assert runs(strip)[0] == "pages 0 to 7: mapped"
    assert "too many pages" in words(t._repr_html_())


def changing_calls(pool) -> tuple[dict[str, int], dict[str, int]]:
    """All but looking for private copies in /proc/self/pagemap."""
    return {name: n for name, n in calls(pool).items() if name != "pagemap"}, mapper_calls(pool)


def test_looking_makes_no_driver_call_and_reads_no_element(pool, monkeypatch):
    IPython = pytest.importorskip("IPython", reason="needs IPython: pip install 'vtensor[test]'")
    t = filled(pool, 9)
    fork = t.fork()
    before = changing_calls(pool)
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda self: pytest.fail("elements were read"))
    monkeypatch.setattr(vtensor.VTensor, "__repr__", lambda self: pytest.fail("elements were read"))
    shown, _ = IPython.core.interactiveshell.InteractiveShell.instance().display_formatter.format(t)
    assert shown["text/html"] == t._repr_html_() and shown["text/plain"].startswith("<VTensor [9, 1024]")
    assert pool._repr_html_()
    assert changing_calls(pool) == before
    fork.close()


# -- runs of pages


def test_runs_end_at_gaps():
    runs: list[pages.PageRun] = []
    for slot in (0, 1, 4):
        pages.append(runs, "pinned", slot)
    assert runs == [("pinned", 0, 2), ("pinned", 4, 5)]
    assert pages.cells(runs, 6, 6) == [*runs[:1], ("reserved", 2, 4), runs[1], ("reserved", 5, 6)]
    assert pages.cells(runs, 6, 3) == [("pinned", 0, 2), ("reserved", 2, 4), ("pinned", 4, 6)]
    assert pages.cells([], 0, 3) == []
