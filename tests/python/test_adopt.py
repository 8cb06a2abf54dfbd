"""A module moved into a pool: the same module, with its memory elsewhere, or nothing."""

from __future__ import annotations

from threading import Thread

import pytest
import torch
from torch.utils.hooks import RemovableHandle

import vtensor
from vtensor import testing


class Model(torch.nn.Module):
    """Tied weights, views of one storage, a view with strides, a shared buffer, and nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 30)
        self.head = torch.nn.Linear(30, 50)
        self.head.weight = self.embed.weight
        flat = torch.randn(2000)
        self.first = torch.nn.Parameter(flat[100:400].view(10, 30))
        self.second = torch.nn.Parameter(flat[500:800].view(30, 10).t())
        self.frozen = torch.nn.Parameter(torch.randn(7), requires_grad=False)
        self.register_buffer("every_second", flat[1000:1100:2])
        self.register_buffer("steps", torch.arange(5), persistent=False)
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("missing", None)
        self.norm = torch.nn.BatchNorm1d(30)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens)) @ self.first.t() @ self.second
        return self.head(x) * self.every_second + self.frozen.sum()


def tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers()])


def facts(module: torch.nn.Module) -> dict:
    """What must not change, whatever becomes of the memory."""
    of = {}
    for name, t in tensors(module).items():
        of[name] = (
            id(t),
            t.dtype,
            t.shape,
            t.stride(),
            t.storage_offset(),
            t.requires_grad,
            id(t.grad),
            type(t),
        )
        of[name] += t.detach().numpy().tobytes(), t.untyped_storage().nbytes()
    return of


def storages(module: torch.nn.Module) -> dict[int, int]:
    """The bytes of each storage, by its address; those of none apart."""
    found = [t.untyped_storage() for t in tensors(module).values()]
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def test_a_module_stays_what_it_is(pool):
    model = Model()
    tokens = torch.randint(0, 50, (16,))
    model(tokens).sum().backward()
    model.eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    expected, before, old = model(tokens), facts(model), storages(model)
    assert vtensor.adopt(model, pool) == sum(old.values())
    assert facts(model) == before
    assert model.head.weight is model.embed.weight
    now = storages(model)
    assert sorted(now.values()) == sorted(old.values())  # as many storages, of the same bytes
    assert not set(now) & set(old)
    assert pool.stats().nbytes_by_tag["weights"] >= sum(old.values())
    assert torch.equal(model(tokens), expected)
    model.first.data.view(-1)[200] = 5  # one storage: positions 100 + 200 are not in the second
    assert model.first.untyped_storage().data_ptr() == model.every_second.untyped_storage().data_ptr()
    model(tokens).sum().backward()
    optimizer.step()
    model.zero_grad()
    with pytest.raises(vtensor.VTensorError, match=r"which a vtensor.Pool maps.*x.clone"):
        model.first.data.share_memory_()
    pool.close()
    assert torch.isfinite(model(tokens)).all()  # tensors outlive the pool


def test_memory_comes_back(pool):
    model = Model()
    vtensor.adopt(model, pool, tag="first")
    vtensor.adopt(model, pool, tag="second")  # once more: the first memory goes
    nbytes = pool.stats().nbytes_by_tag
    assert nbytes["first"] == 0 and nbytes["second"] > 0
    testing.check_invariants(pool)
    model.to(torch.float64)  # new memory, of torch; the integers stay
    assert 0 < pool.stats().nbytes_by_tag["second"] < nbytes["second"]


def test_whole_or_nothing_where_memory_is_short(pool_factory, kind):
    pool, model = pool_factory(kind, 2), Model()
    before, old = facts(model), storages(model)
    with pytest.raises(vtensor.OutOfPages):
        vtensor.adopt(model, pool)
    assert (facts(model), storages(model)) == (before, old)
    assert pool.stats().nbytes_by_tag == {"weights": 0}


class Subclass(torch.Tensor):
    pass


def freed(t: torch.Tensor, nbytes: int) -> torch.Tensor:
    """As FSDP does with what it has sharded."""
    t.untyped_storage().resize_(nbytes)
    return t


def wrapped(transform) -> torch.Tensor:
    """What a function that was transformed sees."""
    seen = []
    transform(lambda x: (seen.append(x), x.sum())[1])(torch.ones(3))
    return seen[0]


UNFIT = [
    ("meta", torch.empty(3, device="meta"), "to_empty"),
    ("sparse", torch.eye(3).to_sparse(), "layout"),
    ("quantized", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "dequantize"),
    ("subclass", torch.ones(3).as_subclass(Subclass), "Subclass"),
    ("conjugated", torch.ones(3, dtype=torch.complex64).conj(), "resolve_conj"),
    ("shared", torch.ones(3).share_memory_(), "shared memory"),
    ("inference", torch.inference_mode()(torch.ones)(3), "made in inference mode"),
    ("nested", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    ("freed", freed(torch.ones(3), 0), "no memory"),
    ("freed in part", freed(torch.ones(3), 8), "no memory"),
    ("vmap", wrapped(torch.vmap), "torch.func"),
    ("grad", wrapped(torch.func.grad), "torch.func"),
]


@pytest.mark.parametrize(("name", "made", "reason"), UNFIT, ids=lambda p: p if isinstance(p, str) else "")
def test_what_cannot_be_moved(host, name, made, reason):
    module = torch.nn.Linear(2, 2)
    module.register_buffer("odd", made)
    before = module.weight.data_ptr()
    with pytest.raises(vtensor.InvalidArgument, match=f"odd .*{reason}.*nothing was moved"):
        vtensor.adopt(module, host)
    assert module.weight.data_ptr() == before


def test_a_vtensor_cannot_be_moved(host):
    with vtensor.zeros(4, grow_dim=0, capacity=8, pool=host) as t:
        with pytest.raises(vtensor.InvalidArgument, match="tensor 0 is a VTensor"):
            vtensor.adopt([t], host)


def training(pool: vtensor.Pool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model of two layers and its optimizer after a step, all of it and the gradients in the pool."""
    model = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Linear(20, 20))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    vtensor.adopt(model, pool)
    step(model, optimizer)
    vtensor.adopt(optimizer, pool, tag="optimizer")
    vtensor.adopt([p.grad for p in model.parameters()], pool, tag="gradients")
    return model, optimizer


def test_an_optimizer_does_not_step_on_weights_that_sleep_in_another_pool(pool):
    model = torch.nn.Linear(20, 20)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    vtensor.adopt(model, pool)
    step(model, optimizer)
    with vtensor.Pool("cpu", budget=1 << 20) as other:
        vtensor.adopt(optimizer, other, tag="optimizer")
        pool.sleep(tag="weights", contents="host")
        with pytest.raises(vtensor.Asleep, match=r"SGD.*wake"):
            optimizer.step()
        late = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises(vtensor.Asleep, match="a parameter of the optimizer"):
            vtensor.adopt(late, other)
        pool.wake()
        vtensor.adopt([p.grad for p in model.parameters()], pool, tag="gradients")
        pool.sleep(tag="gradients", contents="host")
        with pytest.raises(vtensor.Asleep, match="or its gradient"):
            vtensor.adopt(late, other)
        pool.wake()
        optimizer.step()
        optimizer.state.clear()  # the optimizer itself is in a circle


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)
    model(torch.linspace(-1, 1, 60).view(3, 20)).square().sum().backward()
    optimizer.step()


def test_optimizer_state_and_gradients(pool):
    torch.manual_seed(0)
    model, optimizer = training(pool)
    torch.manual_seed(0)
    other = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Linear(20, 20))
    others = torch.optim.AdamW(other.parameters(), 0.1)
    step(other, others)
    nbytes = pool.stats().nbytes_by_tag
    assert nbytes["weights"] == nbytes["gradients"] and nbytes["optimizer"] >= 2 * nbytes["weights"]
    in_pool = [p.grad.data_ptr() for p in model.parameters()]
    in_pool += [state["exp_avg"].data_ptr() for state in optimizer.state.values()]
    for contents in ("host", "discard", "host"):
        kept = contents == "host"
        pool.sleep(tag="optimizer", contents="host")
        pool.sleep(tag="gradients", contents=contents)
        assert pool.stats().nbytes_by_tag == {**nbytes, "optimizer": 0, "gradients": 0}
        assert torch.isfinite(model(torch.ones(20))).all()
        if kept:
            pool.sleep(tag="weights", contents="host")
        pool.wake()
        for module, its in ((model, optimizer), (other, others)):
            step(module, its)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)
    now = [p.grad.data_ptr() for p in model.parameters()]
    now += [state["exp_avg"].data_ptr() for state in optimizer.state.values()]
    assert now == in_pool


def test_what_sleeps_refuses_its_work(pool, tmp_path):
    """A forward pass of any part, an optimizer's step, and what saves or loads their state."""
    model, optimizer = training(pool)
    whole = torch.nn.Sequential(model, torch.nn.ReLU())  # it was not adopted, and parts of it were
    x, saved, state = torch.ones(20), dict(model.state_dict()), optimizer.state_dict()
    saved = {name: value.clone() for name, value in saved.items()}

    def refusals() -> list[str]:
        refused = []
        for name, work in {
            "forward": lambda: model(x),
            "part": lambda: model[1](x),
            "whole": lambda: whole(x),
            "save": lambda: torch.save(whole.state_dict(), tmp_path / "model.pt"),
            "load": lambda: whole.load_state_dict({f"0.{name}": value for name, value in saved.items()}),
            "step": optimizer.step,
            "optimizer save": optimizer.state_dict,
            "optimizer load": lambda: optimizer.load_state_dict(state),
        }.items():
            try:
                work()
            except vtensor.Asleep as error:
                assert "wake()" in str(error)
                refused.append(name)
        return refused

    of_optimizer = ["step", "optimizer save", "optimizer load"]
    assert refusals() == []
    vtensor.adopt(optimizer, pool, tag="optimizer")  # load_state_dict made other tensors
    pool.sleep(tag="optimizer", contents="host")
    assert refusals() == of_optimizer
    pool.wake()
    pool.sleep(tag="gradients", contents="host")
    assert refusals() == ["step"]
    assert not any(module._forward_pre_hooks for module in model.modules())
    pool.wake()
    pool.sleep(tag="weights", contents="host")
    assert refusals() == ["forward", "part", "whole", "save", "load", *of_optimizer]
    pool.sleep(contents="host")
    pool.wake(tag="optimizer")
    assert refusals() == ["forward", "part", "whole", "save", "load", *of_optimizer]
    pool.wake()
    assert refusals() == []
    for module in whole.modules():
        hooks = (module._forward_pre_hooks, module._state_dict_pre_hooks, module._load_state_dict_pre_hooks)
        assert not any(hooks)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_state_dict_pre_hooks


def test_what_sleeps_refuses_before_hooks_of_others_touch_it(pool):
    model = torch.nn.utils.spectral_norm(torch.nn.Linear(20, 20))  # its hook writes to a buffer
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step(model, optimizer)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("step"))
    for register in (model.register_state_dict_pre_hook, model.register_load_state_dict_pre_hook):
        register(lambda *_: called.append("state"))
    vtensor.adopt(model, pool)
    vtensor.adopt(optimizer, pool)
    saved = {name: t.clone() for name, t in model.state_dict().items()}
    called.clear()
    pool.sleep(contents="host")
    for work, *given in ((model, torch.ones(20)), (model.state_dict,), (model.load_state_dict, saved)):
        with pytest.raises(vtensor.Asleep):
            work(*given)
    with pytest.raises(vtensor.Asleep):
        optimizer.step()
    assert called == []
    pool.wake()
    step(model, optimizer)
    assert called == ["step"]
    del model, optimizer, work
    pool.close()


def test_a_part_whose_whole_is_gone_refuses_its_work(pool):
    whole = torch.nn.Sequential(torch.nn.Linear(3, 3))
    vtensor.adopt(whole, pool)
    part = whole[0]
    del whole
    pool.sleep(contents="host")
    with pytest.raises(vtensor.Asleep):
        part(torch.ones(3))
    pool.wake()
    assert not part._forward_pre_hooks


class Remembers(torch.optim.Optimizer):
    """Its state of a parameter is a list of one tensor, and no dict of them."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p] = [p.grad + sum(self.state.get(p, []))]


def test_the_state_of_an_optimizer_need_not_be_a_dict(pool):
    model = torch.nn.Linear(3, 3, bias=False)
    optimizer = Remembers(model.parameters(), {})
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    assert vtensor.adopt(optimizer, pool, tag="optimizer") == 36
    assert pool.sleep(contents="host") and optimizer.state[model.weight][0].shape == (3, 3)
    with pytest.raises(vtensor.Asleep):
        optimizer.step()
    pool.wake()
    optimizer.step()
    assert optimizer.state[model.weight][0].eq(2).all()


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: an optimizer by its class alone."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)


def test_a_wrapper_of_an_optimizer_is_refused_and_sleep_works_on(host):
    optimizer = torch.optim.SGD(torch.nn.Linear(3, 3).parameters(), 0.1)
    with pytest.raises(vtensor.InvalidArgument, match=r"a Wrapper, .*adopt the optimizer that it wraps"):
        vtensor.adopt(Wrapper(optimizer), host)
    vtensor.adopt(optimizer, host)
    host.sleep(contents="host")
    host.wake()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_module_sleeps_and_wakes(pool):
    """It takes no hooks, so only a module that it is a part of refuses its work."""
    scripted = torch.jit.script(torch.nn.Linear(3, 3))
    whole = torch.nn.Sequential(scripted)
    before = whole(torch.ones(3))
    vtensor.adopt(whole, pool)
    pool.sleep(contents="host")
    with pytest.raises(vtensor.Asleep):
        whole(torch.ones(3))
    pool.wake()
    assert torch.equal(whole(torch.ones(3)), before)


def test_what_a_signal_handler_puts_to_sleep_while_it_wakes_refuses_its_work(pool, monkeypatch):
    model = torch.nn.Linear(3, 3)
    vtensor.adopt(model, pool)
    pool.sleep(contents="host")

    def remove_and_sleep(hook, remove=RemovableHandle.remove):
        remove(hook)
        monkeypatch.undo()
        pool.sleep(contents="host"), pool.wake(), pool.sleep(contents="host")

    monkeypatch.setattr(RemovableHandle, "remove", remove_and_sleep)
    pool.wake()
    with pytest.raises(vtensor.Asleep):
        model(torch.ones(3))
    pool.wake()
    assert not model._forward_pre_hooks and not model._state_dict_pre_hooks


def test_what_is_being_copied_falls_asleep_only_after(pool, pool_factory, kind, monkeypatch):
    """Neither what is read nor what is written: other threads wait."""
    other = pool_factory(kind, 64)
    model = torch.nn.Linear(20, 20, bias=False)
    vtensor.adopt(model, pool)
    kept = model.weight.detach().clone()

    def copy_beside_sleeps(new, storage, copy=vtensor._torch.memory._copy):
        for thread in threads:
            thread.start()
            thread.join(0.1)
            assert thread.is_alive()
        yield from copy(new, storage)

    threads = [Thread(target=one.sleep, kwargs={"contents": "host"}) for one in (pool, other)]
    monkeypatch.setattr("vtensor._torch.memory._copy", copy_beside_sleeps)
    vtensor.adopt(model, other)
    for thread in threads:
        thread.join()
    assert other.stats().nbytes_asleep > 0
    other.wake()
    assert torch.equal(model.weight, kept)


def test_memory_that_changes_while_it_is_copied_is_not_adopted(pool, monkeypatch):
    model = torch.nn.Linear(20, 20)

    def copy_and_move(new, storage, copy=vtensor._torch.memory._copy):
        yield from copy(new, storage)
        model.weight.data = torch.ones(20, 20)  # as another thread may

    monkeypatch.setattr("vtensor._torch.memory._copy", copy_and_move)
    with pytest.raises(vtensor.VTensorError, match=r"while it was being copied.*nothing was moved"):
        vtensor.adopt(model, pool)
    assert model.weight.eq(1).all() and pool.stats().nbytes_by_tag == {"weights": 0}


def test_memory_that_sleeps_is_not_adopted(pool, pool_factory, kind, monkeypatch):
    """By its address: whichever pool has it, and whatever looks at it."""
    other = pool_factory(kind, 64)
    model = torch.nn.Linear(20, 20, bias=False)
    vtensor.adopt(model, pool)
    arena = vtensor.Arena(4096, pool=pool)
    arena.map([(0, 4096)])
    kept = model.weight.detach().clone()
    views = {
        "the module": model,
        "a view": [model.weight.data[3:5]],
        "an empty view": [model.weight.data[:0]],
        "another parameter": torch.nn.ParameterList([torch.nn.Parameter(model.weight.data.view(-1))]),
        "an arena": [arena.tensor[5:9]],
    }
    pool.sleep(contents="host")
    for what in views.values():
        for to in (pool, other):
            with pytest.raises(vtensor.Asleep, match=r"\[adopt\].*asleep.*wake\(\)"):
                vtensor.adopt(what, to, tag="second")
    assert other.stats().pages_used == 0
    pool.wake()
    assert torch.equal(model.weight, kept)

    def copy_and_sleep(new, storage, copy=vtensor._torch.memory._copy):
        yield from copy(new, storage)
        pool.sleep(contents="host")  # as another thread may

    monkeypatch.setattr("vtensor._torch.memory._copy", copy_and_sleep)
    with pytest.raises(vtensor.Asleep, match="being copied"):
        vtensor.adopt(model, other)
    monkeypatch.undo()
    pool.wake()
    assert torch.equal(model.weight, kept)
    vtensor.adopt(model, other)
    assert torch.equal(model.weight, kept)
