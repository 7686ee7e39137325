"""Sparse (COO) gradients: uncoalesced, with duplicates, as torch.optim takes them.

torch adds the duplicates of a row in another order, and keeps a sparse momentum buffer that it
adds up on use; results agree within a few roundings: ``rtol`` 1e-14 in float64, 1e-5 in float32
relative to the change of a parameter of size one.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functional_optim import (
    Optimizer,
    adagrad,
    algorithms,
    chain,
    clip_by_global_norm,
    clip_by_value,
    decoupled_weight_decay,
    sgd,
    weight_decay,
)

from .support import Frozen, assert_same, noise, same_bits

ROWS, WIDTH = 10, 3
CASES: dict[str, tuple[type[torch.optim.Optimizer], Callable[..., Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, sgd, {"lr": 0.1}),
    "sgd ascending": (torch.optim.SGD, sgd, {"lr": 0.1, "maximize": True}),
    "momentum": (torch.optim.SGD, sgd, {"lr": 0.1, "momentum": 0.9}),
    "dampening": (torch.optim.SGD, sgd, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "nesterov": (torch.optim.SGD, sgd, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, adagrad, {"lr": 0.1, "lr_decay": 0.2}),
    "adagrad ascending": (
        torch.optim.Adagrad,
        adagrad,
        {"lr": 0.1, "initial_accumulator_value": 0.3, "maximize": True},
    ),
}
ONLY_ROWS = [name for name, (_, _, hyper) in CASES.items() if "momentum" not in hyper]
TOLERANCES = [(torch.float64, 1e-14), (torch.float32, 5e-6)]


def _sparse(seed: int, dtype: torch.dtype = torch.float64, stored: int = 7) -> Tensor:
    """A gradient that stores some rows of the first half, several of them twice."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(0, ROWS // 2, (1, stored), generator=generator)
    index[0, 0] = index[0, 1] = 2
    grad = torch.sparse_coo_tensor(
        index, noise(seed, stored, WIDTH, dtype=dtype), (ROWS, WIDTH), check_invariants=True
    )
    assert not grad.is_coalesced()
    return grad


def _dense(value: Tensor) -> Tensor:
    return value.to_dense() if value.is_sparse else value


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly")  # of torch's Adagrad
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("name", CASES)
def test_params_and_state_are_those_of_torch(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    twin, make, hyper = CASES[name]
    theirs = nn.Parameter(noise(0, ROWS, WIDTH, dtype=dtype))
    torch_optimizer = twin([theirs], foreach=False, **hyper)
    optimizer = make(**hyper)
    param, state = theirs.detach().clone(), optimizer.init(theirs)
    for step in range(5):
        theirs.grad = _sparse(step, dtype)
        torch_optimizer.step()
        param, state = optimizer.update(param, _sparse(step, dtype), state)
        torch.testing.assert_close(param, theirs.detach(), rtol=tolerance, atol=tolerance)
    own = state.leaves.stages[-1]._asdict()
    for field, wanted in torch_optimizer.state[theirs].items():
        if field == "step":
            assert int(wanted) == int(state.leaves.step)
        else:
            value = own.pop(field)
            value = value[0] if isinstance(value, list) else value
            torch.testing.assert_close(value, _dense(wanted), rtol=tolerance, atol=tolerance)
    assert all(value == [] for value in own.values())


@pytest.mark.parametrize("name", CASES)
def test_every_way_of_stepping_is_the_same(name: str) -> None:
    optimizer = CASES[name][1](**CASES[name][2])
    start = noise(0, ROWS, WIDTH)
    param, state = start, optimizer.init(start)
    dense, dense_state = start, optimizer.init(start)
    written, bound, pure = start.clone(), start.clone(), start
    written_state, pure_state = optimizer.init(start), optimizer.init(start)
    program = optimizer.script([bound])
    scripted = optimizer.using(executor="script")
    for step in range(4):
        grad = _sparse(step)
        dense, dense_state = optimizer.update(dense, grad.to_dense(), dense_state)
        param, state = optimizer.update(param, grad, state)
        optimizer.update_(written, grad, written_state)
        pure, pure_state = scripted.update(pure, grad, pure_state)
        if step % 2:
            program.step([grad])
        else:
            program.step_param(bound, grad)
    assert_same((param, state), (dense, dense_state))
    assert_same((written, written_state), (param, state))
    assert_same((pure, pure_state), (param, state))
    assert_same(bound, param)
    assert_same(program.state.leaves[0], state.leaves)


@pytest.mark.parametrize("name", ONLY_ROWS)
def test_rows_that_are_not_stored_keep_their_bits(name: str) -> None:
    """Even where they are not finite, or arithmetic would change the sign of a zero."""
    optimizer = CASES[name][1](**CASES[name][2])
    param = noise(0, ROWS, WIDTH)
    param[-1], param[-2], param[-3] = torch.nan, -0.0, torch.inf
    before = param.clone()
    new, _ = optimizer.update(param, _sparse(0), optimizer.init(param))
    optimizer.update_(param, _sparse(0), optimizer.init(param))
    for result in (new, param):
        assert same_bits(result[ROWS // 2 :], before[ROWS // 2 :])
        assert not torch.equal(result[2], before[2])


def test_gradients_are_not_coalesced_behind_the_caller() -> None:
    grad, param = _sparse(0), noise(0, ROWS, WIDTH)
    frozen = Frozen(param)
    values = grad._values().clone()
    sgd(0.1).update(param, grad, sgd().init(param))
    assert not grad.is_coalesced()
    assert torch.equal(grad._values(), values)
    frozen.assert_untouched()


REFUSING = {
    **{
        name: getattr(algorithms, name)()
        for name in sorted({*algorithms.__all__} - {"sgd", "adagrad"})
    },
    "weight_decay": sgd(weight_decay=0.1),
    "weight_decay of adagrad": adagrad(weight_decay=0.1),
    "weight_decay as a link": chain(weight_decay(0.1), sgd()),
}


@pytest.mark.parametrize("method", ["update", "update_", "script"])
@pytest.mark.parametrize("name", REFUSING)
def test_others_refuse_by_name_and_change_nothing(name: str, method: str) -> None:
    optimizer = REFUSING[name]
    params = {"a": noise(0, ROWS, WIDTH), "z": noise(1, ROWS, WIDTH)}
    grads = {"a": noise(2, ROWS, WIDTH), "z": _sparse(0)}
    state = optimizer.init(params)
    frozen = Frozen(params, state)
    who = "weight_decay" if name.startswith("weight") else name.removesuffix("w")
    ways: dict[str, Callable[[], Any]] = {
        "update": lambda: optimizer.update(params, grads, state),
        "update_": lambda: optimizer.update_(params, grads, state),
        "script": lambda: optimizer.script(params, state).step(list(grads.values())),
    }
    with pytest.raises(RuntimeError, match=rf"'z' has layout torch\.sparse_coo.* by {who} "):
        ways[method]()
    frozen.assert_untouched()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_other_sparse_layouts_are_refused() -> None:
    param = noise(0, ROWS, WIDTH)
    with pytest.raises(RuntimeError, match=r"'<root>' has layout torch\.sparse_csr"):
        sgd().update(param, _sparse(0).to_dense().to_sparse_csr(), sgd().init(param))


@pytest.mark.parametrize(
    "optimizer",
    [
        chain(clip_by_global_norm(0.5), sgd(0.1)),
        chain(clip_by_value(0.2), clip_by_global_norm(0.5), adagrad(0.1)),
        chain(decoupled_weight_decay(0.5), sgd(0.1)),
        chain(clip_by_global_norm(0.5), sgd(0.1, momentum=0.9)),
    ],
    ids=["norm", "both", "decay", "momentum"],
)
def test_chains_see_the_dense_gradient(optimizer: Optimizer) -> None:
    params = {"a": noise(0, ROWS, WIDTH), "b": noise(1, 4)}
    state = optimizer.init(params)
    sparse, _ = optimizer.update(params, {"a": _sparse(0), "b": noise(2, 4)}, state)
    dense, _ = optimizer.update(params, {"a": _sparse(0).to_dense(), "b": noise(2, 4)}, state)
    torch.testing.assert_close(sparse, dense, rtol=1e-15, atol=0)


def test_no_stored_row_is_a_step_that_moves_nothing() -> None:
    param = noise(0, ROWS, WIDTH)
    empty = torch.sparse_coo_tensor(
        torch.zeros(1, 0, dtype=torch.int64),
        torch.zeros(0, WIDTH).double(),
        (ROWS, WIDTH),
        check_invariants=True,
    )
    new, state = adagrad(0.1).update(param, empty, adagrad().init(param))
    assert_same(new, param)
    assert int(state.leaves.step) == 1


def test_two_sparse_dimensions_and_complex_rows() -> None:
    matrix = noise(0, ROWS, WIDTH, dtype=torch.complex128)
    index = torch.tensor([[1, 1, 4], [2, 2, 0]])
    grad = torch.sparse_coo_tensor(
        index, noise(1, 3, dtype=torch.complex128), (ROWS, WIDTH), check_invariants=True
    )
    for optimizer in (sgd(0.1), adagrad(0.1), sgd(0.1, momentum=0.9)):
        sparse = optimizer.update(matrix, grad, optimizer.init(matrix))
        dense = optimizer.update(matrix, grad.to_dense(), optimizer.init(matrix))
        assert_same(sparse, dense)
        written, state = matrix.clone(), optimizer.init(matrix)
        optimizer.update_(written, grad, state)
        assert_same((written, state), sparse)


def test_a_strided_parameter_takes_sparse_rows() -> None:
    param = noise(0, WIDTH, 2 * ROWS).t()[::2]
    assert not param.is_contiguous()
    new, _ = adagrad(0.1).update(param, _sparse(0), adagrad().init(param))
    wanted, _ = adagrad(0.1).update(param, _sparse(0).to_dense(), adagrad().init(param))
    assert_same(new, wanted)
    assert new.stride() == param.stride()
    adagrad(0.1).update_(param, _sparse(0), adagrad().init(param))
    assert_same(param, wanted)
