"""11. Which addresses a kernel may be given: what cuPointerGetAttribute(DEVICE_POINTER) answers to them.

Triton asks it of every tensor that it launches a kernel over, and raises where the answer is no; so do
torch.compile and FlexAttention, whose kernels are Triton's. The first page of a KVCache's layer is not
mapped while slot 0 is free, or once its window has passed it.
"""

from __future__ import annotations

import importlib.util
from functools import partial

import torch

from .driver import NO_ACCESS, READ_ONLY, Driver, Pages
from .session import Session, first_line

PAGE = 2 << 20


def run(session: Session) -> None:
    driver = session.driver
    driver.must(driver.retain_context())
    answers = answers_by_address(driver)
    for address, code in answers.items():
        session.fact(f"DEVICE_POINTER of an address that is {address}", driver.name_of(code))
    known = [address for address, code in answers.items() if code == 0]
    unknown = [address for address, code in answers.items() if code != 0]
    session.answer(
        f"Kernels may be given addresses that are {', '.join(known)}; not what is {', '.join(unknown)}."
    )
    if importlib.util.find_spec("triton") is None or session.rehearsal:
        session.skipped("Triton kernels", "they need Triton and a GPU")
        return
    for case in CASES:
        end = session.run_case(case, 20)
        said = end.facts.get("Triton says", f"the process {end.text}: {end.error_tail.strip()[-200:]}")
        session.fact(case, said)
        session.answer(f"{case}: {said}.")


def answers_by_address(driver: Driver) -> dict[str, int]:
    """Of a range of six pages: what is asked of each."""
    with Pages(driver, PAGE, 6, 4) as pages:
        for slot in range(4):
            driver.must(pages.map(slot, pages.handles[slot]))
        driver.must(pages.set_access(0))
        driver.must(pages.set_access(1, 1, READ_ONLY))
        driver.must(pages.set_access(2))
        driver.must(pages.set_access(2, 1, NO_ACCESS))
        asked = {
            "mapped": pages.at(0),
            "mapped, inside a page": pages.at(0) + PAGE // 2,
            "mapped read-only": pages.at(1),
            "mapped, and its access taken away": pages.at(2),
            "mapped, and never given access": pages.at(3),
            "reserved": pages.at(5),
        }
        answers = {name: driver.device_pointer(address) for name, address in asked.items()}
        driver.must(pages.map(4, pages.handles[0]))
        driver.must(pages.unmap(4))
        answers["reserved, and was mapped before"] = driver.device_pointer(pages.at(4))
        outside = pages.address
    answers["no longer reserved"] = driver.device_pointer(outside)
    return answers


def triton_reads(session: Session, first_is_mapped: bool) -> None:
    """A Triton kernel over two pages that reads in the second one only."""
    from .triton_kernel import read_one

    with Pages(session.driver, PAGE, 2, 1) as pages:
        session.driver.must(pages.map(1, pages.handles[0]))
        session.driver.must(pages.set_access(1))
        second = session.tensor_at(pages.at(1), (PAGE // 4,), torch.int32).fill_(42)
        slot = 1 if first_is_mapped else 0
        given = session.tensor_at(pages.at(slot), (PAGE // 4,), torch.int32)
        out = torch.zeros(1, dtype=torch.int32, device=session.device.torch_device)
        session.device.synchronize()
        try:
            read_one[(1,)](given, (second.data_ptr() - given.data_ptr()) // 4, out)
            session.fact("Triton says", f"nothing, and reads {int(out)} of 42")
        except Exception as error:
            session.fact("Triton says", first_line(error))


CASES = {
    "a Triton kernel over a tensor whose first page is mapped": partial(triton_reads, first_is_mapped=True),
    "a Triton kernel over a tensor whose first page is not": partial(triton_reads, first_is_mapped=False),
}
