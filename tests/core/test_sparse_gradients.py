"""Sparse (COO) gradients, uncoalesced and with duplicates, as torch.optim takes them.

torch adds the duplicates of a row in another order, and adds up a sparse momentum buffer on use.
Results agree within a few roundings: 1e-14 in float64, and 5e-6 in float32.
"""

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
from functional_optim.kernels import ExecutorName
from tests.choices import each_value

from ..choices import case
from .sparse import ROWS, SPARSE, WIDTH, dense, sparse
from .support import GIVEN, IN_PYTHON, Frozen, assert_same, like, noise, refused, same_bits, step

TOLERANCES = {torch.float64: 1e-14, torch.float32: 5e-6}
START = noise(0, ROWS, WIDTH)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly")  # of torch's Adagrad
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_params_and_state_are_those_of_torch(dtype: torch.dtype) -> None:
    for name, (twin, make, hyper) in SPARSE.items():
        theirs = nn.Parameter(START.to(dtype))
        torch_optimizer = twin([theirs], foreach=False, **hyper)
        optimizer = make(**hyper)
        param, state = theirs.detach().clone(), optimizer.init(theirs)
        near: Any = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
        for seed in range(4):
            theirs.grad = sparse(seed, dtype)
            torch_optimizer.step()
            param, state = optimizer.update(param, sparse(seed, dtype), state)
            with case(name=name, seed=seed):
                torch.testing.assert_close(param, theirs.detach(), **near)
        own = {key: v for key, v in state.leaves.stages[-1]._asdict().items() if v != []}
        own["step"] = state.leaves.step
        for field, wanted in torch_optimizer.state[theirs].items():
            value = own.pop(field)
            value = value[0] if isinstance(value, list) else value
            with case(name=name, field=field):
                torch.testing.assert_close(value.to(wanted.dtype), dense(wanted), **near)
        assert own.keys() <= {"step"}


@each_value(name=list(SPARSE), executor=IN_PYTHON)
def test_every_way_of_stepping_is_the_dense_one(name: str, executor: ExecutorName) -> None:
    _, make, hyper = SPARSE[name]
    optimizer, written = make(**hyper).using(executor=executor), START.clone()
    stepped = wanted = START, optimizer.init(START)
    written_state = optimizer.init(START)
    for seed in range(3):
        grad = sparse(seed)
        wanted = optimizer.update(wanted[0], grad.to_dense(), wanted[1])
        stepped = optimizer.update(stepped[0], grad, stepped[1])
        optimizer.update_(written, grad, written_state)
        assert_same(stepped, wanted)
        assert_same((written, written_state), wanted)
        assert not grad.is_coalesced()
        assert torch.equal(grad._values(), sparse(seed)._values())


@each_value(name=[name for name, (_, _, hyper) in SPARSE.items() if "momentum" not in hyper])
def test_rows_that_are_not_stored_keep_their_bits(name: str) -> None:
    """Rows keep numbers that are not finite, and zeros keep signs that arithmetic would change."""
    _, make, hyper = SPARSE[name]
    optimizer, param = make(**hyper), START.clone()
    param[-1], param[-2], param[-3] = torch.nan, -0.0, torch.inf
    before = param.clone()
    new = step(optimizer, param, sparse(0))
    optimizer.update_(param, sparse(0), optimizer.init(param))
    for result in (new, param):
        assert same_bits(result[ROWS // 2 :], before[ROWS // 2 :])
        assert not torch.equal(result[2], before[2])


TAKING = ("sgd", "adagrad", "rowwise_adagrad", "ftrl", "sign_sgd", "sparse_adam")
REFUSING = {
    **{
        name: getattr(algorithms, name)()
        for name in sorted({*algorithms.__all__} - {*TAKING, *GIVEN})
    },
    "weight_decay": sgd(weight_decay=0.1),
    "weight_decay of adagrad": adagrad(weight_decay=0.1),
    "weight_decay as a link": chain(weight_decay(0.1), sgd()),
}


@each_value(name=list(REFUSING), executor=IN_PYTHON)
def test_others_refuse_by_name_and_change_nothing(name: str, executor: ExecutorName) -> None:
    optimizer = REFUSING[name].using(executor=executor)
    params = {"a": START.clone(), "z": START.clone()}
    grads = {"a": noise(2, ROWS, WIDTH), "z": sparse(0)}
    state = optimizer.init(params)
    frozen = Frozen(params, state)
    stages = {"adamw": "adam", "lamb": "scale_by_adam", "lars": "scale_by_trust_ratio"}
    who = "weight_decay" if name.startswith("weight") else stages.get(name, name)
    for way in (optimizer.update, optimizer.update_):
        with refused(RuntimeError, rf"'z' has layout torch\.sparse_coo.* by {who} ", way=way):
            way(params, grads, state)
        frozen.assert_untouched()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_other_sparse_layouts_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"'<root>' has layout torch\.sparse_csr"):
        step(sgd(), START, sparse(0).to_dense().to_sparse_csr())


@each_value(
    optimizer=[
        chain(clip_by_global_norm(0.5), sgd(0.1)),
        chain(clip_by_value(0.2), clip_by_global_norm(0.5), adagrad(0.1)),
        chain(decoupled_weight_decay(0.5), sgd(0.1)),
        chain(clip_by_global_norm(0.5), sgd(0.1, momentum=0.9)),
    ]
)
def test_chains_see_the_dense_gradient(optimizer: Optimizer) -> None:
    params = {"a": START, "b": noise(1, 4)}
    grads: dict[str, Tensor] = {"a": sparse(0), "b": noise(2, 4)}
    wanted = step(optimizer, params, {**grads, "a": sparse(0).to_dense()})
    torch.testing.assert_close(step(optimizer, params, grads), wanted, rtol=1e-15, atol=0)


def _of(index: Any, values: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor(index, dtype=torch.int64), values, (ROWS, WIDTH), check_invariants=True
    )


def test_no_stored_row_is_a_step_that_moves_nothing() -> None:
    empty = _of([[]], torch.zeros(0, WIDTH).double())
    new, state = adagrad(0.1).update(START, empty, adagrad().init(START))
    assert_same(new, START)
    assert int(state.leaves.step) == 1


CELLS = _of([[1, 1, 4], [2, 2, 0]], noise(1, 3, dtype=torch.complex128))
STRIDED = noise(0, WIDTH, 2 * ROWS).t()[::2]


@each_value(
    given=[(noise(0, ROWS, WIDTH, dtype=torch.complex128), CELLS), (STRIDED, sparse(0))],
    optimizer=[sgd(0.1), adagrad(0.1), sgd(0.1, momentum=0.9)],
)
def test_any_sparse_dimensions_dtype_and_strides(
    given: tuple[Tensor, Tensor], optimizer: Optimizer
) -> None:
    param, grad = given
    made = optimizer.update(param, grad, optimizer.init(param))
    wanted = optimizer.update(param, grad.to_dense(), optimizer.init(param))
    written = like(param, param), optimizer.init(param)
    optimizer.update_(written[0], grad, written[1])
    assert_same(made, wanted)
    assert_same(written, wanted)
    assert made[0].stride() == param.stride()
