"""DistributedOptimizer over Ray: the laws of every transport, and tests of actors only."""

import functools
import gc
import threading
import weakref
from math import inf
from typing import Any

import pytest
import ray
import torch

from functional_optim import DistributedOptimizer, sgd
from functional_optim.remote import RayTransport
from functional_optim.remote.ray_actor import decode, encode
from tests.choices import case

from ..laws import LAWS, Make, values
from ..support import LIMIT, assert_same, gradients, locally, noise, parameters, placement
from ..transports import WANTED, Shelf, tried

over_ray = DistributedOptimizer.over_ray


@pytest.fixture
def make(shared: RayTransport) -> Make:
    return functools.partial(over_ray, transport=shared)


def test_actors_place_call_and_fail(shared: RayTransport) -> None:
    assert tried(shared, "ps0") == WANTED
    closed = RayTransport()
    closed.close()
    with pytest.raises(RuntimeError, match="'one' is closed"):
        closed.place("one", Shelf, torch.ones(1))


@pytest.mark.parametrize("law", LAWS)
def test_laws_of_every_transport(law: str, make: Make) -> None:
    LAWS[law](make)


def test_a_message_is_one_buffer_that_nobody_copies() -> None:
    """A tensor that occurs twice stays one tensor; values, kinds, and errors survive."""
    sparse = torch.sparse_coo_tensor(
        [[3, 1, 3]], noise(0, 3, 2), (5, 2), is_coalesced=False, check_invariants=True
    )
    twice = noise(1, 3).requires_grad_()
    sent: dict[str, Any] = {
        "many": [noise(k, k % 7) for k in range(300)],
        "twice": [twice, twice],
        "sparse": sparse,
        "kinds": [
            noise(2, 3, 2).t(),
            torch.zeros(0, 2),
            torch.ones((), dtype=torch.bool),
            torch.complex(noise(3, 2), noise(4, 2)).conj(),
            noise(5, 3).bfloat16(),
        ],
        "none": None,
        "error": LookupError("nothing"),
        "function": lambda: 3,
    }
    message = encode(sent)
    data = message.data.copy()
    data.flags.writeable = False  # Ray returns read-only buffers
    got = decode(message._replace(data=data))
    start, end = data.ctypes.data, data.ctypes.data + data.nbytes
    for name in ("many", "kinds"):
        for one, own in zip(got[name], sent[name], strict=True):
            assert one.dtype == own.dtype
            assert torch.equal(one, own)
            assert not one.numel() or start <= one.data_ptr() < end
    assert got["twice"][0] is got["twice"][1]
    assert got["twice"][0].is_leaf and got["twice"][0].requires_grad
    assert torch.equal(got["sparse"]._indices(), sparse._indices())
    assert torch.equal(got["sparse"]._values(), sparse._values())
    assert not got["sparse"].is_coalesced()
    assert (got["none"], str(got["error"]), got["function"]()) == (None, "nothing", 3)


def test_optimizers_share_actors_and_what_is_closed_is_forgotten(shared: RayTransport) -> None:
    first, second = (
        over_ray(sgd, parameters(), placement(2), lr=lr, transport=shared) for lr in (0.1, 0.2)
    )
    watch = shared.place("ps0", _Watch).result(LIMIT)
    before = shared.call(watch, "alive").result(LIMIT)
    first.step(gradients(0))
    first.close()
    with pytest.raises(RuntimeError, match="this optimizer is closed"):
        first.step(gradients(1))
    second.step(gradients(0))
    assert shared.call(watch, "alive").result(LIMIT) == before - 1
    assert_same(values(second), locally(sgd(lr=0.2), [gradients(0)]))
    second.close()


@pytest.mark.usefixtures("shared")
def test_the_first_object_of_an_actor_is_dropped_as_any_other() -> None:
    transport = RayTransport()
    first = transport.place("first", Shelf, torch.ones(1)).result(LIMIT)
    dropped = threading.Event()
    weakref.finalize(first, dropped.set)
    del first
    gc.collect()
    assert dropped.wait(LIMIT)  # the thread that received the answer can still hold the object
    transport.close()


def test_arguments_that_cannot_be_sent_keep_no_object_alive(shared: RayTransport) -> None:
    """The next message tells the actor which objects were dropped, even if one message failed."""
    optimizer = over_ray(sgd, parameters(), placement(2), lr=0.1, transport=shared)
    watch = shared.place("ps0", _Watch).result(LIMIT)
    before = shared.call(watch, "alive").result(LIMIT)
    optimizer.close()
    with pytest.raises(TypeError, match="pickle"):
        shared.call(watch, "alive", threading.Lock()).result(LIMIT)
    assert shared.call(watch, "alive").result(LIMIT) == before - 1


class _Watch:
    """Object on a worker that counts the optimizers that are alive there."""

    def alive(self) -> int:
        import gc

        from functional_optim.remote.worker import WorkerOptimizer

        gc.collect()
        return sum(isinstance(one, WorkerOptimizer) for one in gc.get_objects())


def test_a_class_of_a_script_needs_no_module(make: Make) -> None:
    class Adding(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for param in self.param_groups[0]["params"]:
                param.data.add_(1.0)

    with pytest.warns(UserWarning, match="Adding.* has no functional equivalent"):
        optimizer = make(Adding, parameters(), placement(2))
    optimizer.step(gradients(0))
    assert_same(values(optimizer), {name: one + 1.0 for name, one in parameters().items()})
    optimizer.close()


def test_bad_input_is_named_with_its_cure(
    shared: RayTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, where = parameters(), placement(2)
    optimizer = over_ray(sgd, params, where, transport=shared)
    alone = {"ps1": {"max_restarts": 1, "num_cpus": 1}}
    unknown = RayTransport(options={name: {"cpus": 1} for name in ("ps0", "ps1")})

    def over_unknown() -> DistributedOptimizer:
        return over_ray(sgd, params, where, transport=unknown)

    wrong: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "^timeout must be a finite number", lambda: RayTransport(timeout=0.0)),
        (ValueError, "^start_timeout must be .* got inf", lambda: RayTransport(start_timeout=inf)),
        (
            ValueError,
            "^start_timeout=3.0 is for a transport that is made here: give it to RayTransport",
            lambda: over_ray(sgd, params, where, transport=shared, start_timeout=3.0),
        ),
        (
            ValueError,
            "^start_timeout must be .* got 0.0",
            lambda: over_ray(sgd, params, where, start_timeout=0.0),
        ),
        (ValueError, "of 'ps1' have max_restarts: ", lambda: RayTransport(options=alone)),
        (ValueError, "constructor failed on 2 of 2 workers:\n  ps0: .*keyword cpus", over_unknown),
        (TypeError, "no distributed autograd contexts", lambda: optimizer.step(7)),
        (ValueError, "got 1 gradients for 4", lambda: optimizer.step([None])),
        (ValueError, "lr must be", lambda: over_ray(sgd, params, where, lr=-1.0)),
    ]
    for kind, text, call in wrong:
        with case(text=text), pytest.raises(kind, match=text):
            call()
    odd = optimizer.state_dict()
    odd["param_groups"][0]["lr"] = -1.0
    with pytest.raises(
        ValueError, match="load_state_dict failed on 2 of 2 workers:\n  ps0: ValueError: "
    ) as caught:
        optimizer.load_state_dict(odd)
    assert "on the worker ps0:" in caught.value.errors["ps0"].__notes__[0]
    assert_same(values(optimizer), parameters())
    optimizer.close()
    unknown.close()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match=r"call ray.init\(\) first"):
        RayTransport()
