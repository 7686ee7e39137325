"""NAdam, RAdam, ASGD, Adafactor and SparseAdam: sparse gradients, state dicts and changes.

A law checks that each has the bits of torch's class with all options. See test_optim_db.py, too.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functional_optim import (
    TorchOptimizer,
    adafactor,
    asgd,
    from_torch,
    nadam,
    sparse_adam,
)

from ..choices import case
from ..core.sparse import ROWS, WIDTH, sparse
from ..core.support import noise, same_bits, steps


def of_pairs(seed: int, dtype: torch.dtype) -> Tensor:
    """Return a sparse gradient of single elements, some of them twice."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(0, WIDTH, (2, 9), generator=generator)
    values = noise(seed, 9, dtype=dtype)
    return torch.sparse_coo_tensor(places, values, (ROWS, WIDTH), check_invariants=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_sparse_adam_is_torchs_of_sparse_gradients(dtype: torch.dtype) -> None:
    """SparseAdam equals torch's for sparse rows, single elements, duplicates, and no elements."""
    none = torch.sparse_coo_tensor(
        torch.zeros(1, 0, dtype=torch.int64),
        torch.zeros(0, WIDTH, dtype=dtype),
        (ROWS, WIDTH),
        check_invariants=True,
    )
    changed: dict[str, Any] = {"lr": 0.1, "betas": (0.5, 0.7), "eps": 1e-3, "maximize": True}
    for hyper in ({}, changed):
        start = noise(0, ROWS, WIDTH, dtype=dtype)
        theirs, ours = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        optimizer = sparse_adam(**hyper)
        pair = torch.optim.SparseAdam([theirs], **hyper), TorchOptimizer([ours], optimizer)
        param, state = start, optimizer.init(start)
        for seed in range(12):
            kinds = (sparse(seed, dtype), of_pairs(seed, dtype), none)
            for leaf, one in zip((theirs, ours), pair, strict=True):
                leaf.grad = kinds[seed % 3].clone()
                one.step()
            param, state = optimizer.update(param, kinds[seed % 3], state)
        with case(hyper=hyper):
            assert same_bits(param, theirs)
            assert same_bits(ours, theirs)
            for key, value in state.leaves.stages[-1]._asdict().items():
                assert same_bits(value, pair[0].state[theirs][key])
                assert same_bits(pair[1].state[ours][key], value)


def test_sparse_adam_refuses_dense_gradients_as_torch_does() -> None:
    param, optimizer = torch.ones(3, 2), sparse_adam()
    for way in (optimizer.update, optimizer.update_):
        with pytest.raises(RuntimeError, match=r"dense.*sparse_adam.*to_sparse.*takes_dense"):
            way(param, torch.ones(3, 2), optimizer.init(param))
    leaf = nn.Parameter(param.clone())
    leaf.grad = torch.ones(3, 2)
    for made in (torch.optim.SparseAdam([leaf]), TorchOptimizer([leaf], optimizer)):
        with pytest.raises(RuntimeError, match="dense"):
            made.step()
    for bound in (optimizer.bind, optimizer.script):
        with pytest.raises(RuntimeError, match="takes dense gradients"):
            bound({"table": param})
    assert torch.equal(leaf, param)


def test_sparse_adam_goes_on_in_torch_and_back() -> None:
    """SparseAdam's state moves to torch and back.

    Its step count is an int there, since torch would compute another step size from float32.
    """
    theirs = nn.Parameter(noise(0, ROWS, WIDTH))
    live = torch.optim.SparseAdam([theirs], lr=0.1)
    leaf = nn.Parameter(theirs.detach().clone())
    ours = TorchOptimizer([leaf], from_torch(live).optimizer)
    for seed in range(12):
        if seed == 4:
            ours.load_state_dict(live.state_dict())
        if seed == 8:
            written = ours.state_dict()
            assert type(written["state"][0]["step"]) is int
            live = torch.optim.SparseAdam([theirs], lr=0.1)
            live.load_state_dict(copy.deepcopy(written))  # torch keeps references to the tensors
        for one, param in ((live, theirs), (ours, leaf)):
            param.grad = sparse(seed)
            one.step()
        assert same_bits(leaf, theirs)


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD])
def test_what_changes_between_steps_is_used_when_torch_uses_it(make: Any) -> None:
    """Changed hyper-parameters take effect in the same step as in torch.

    ASGD uses a learning rate one step later. NAdam's product includes all momenta so far.
    """
    theirs, leaf = (nn.Parameter(noise(0, 5, dtype=torch.float32)) for _ in range(2))
    live = make([theirs], lr=0.1, foreach=False)
    ours = TorchOptimizer([leaf], from_torch(live).optimizer)
    for seed in range(9):
        for one, param in ((live, theirs), (ours, leaf)):
            group = one.param_groups[0]
            group["lr"] = 0.1 / (1 + seed)
            if "betas" in group:
                group["betas"] = (0.9 - seed / 20, 0.99)
            param.grad = noise(seed, 5, dtype=torch.float32)
            one.step()
        assert same_bits(leaf, theirs)


def test_numbers_follow_torchs_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        for make, optimizer in ((torch.optim.NAdam, nadam()), (torch.optim.ASGD, asgd(t0=1))):
            theirs, leaf = (nn.Parameter(noise(0, 5)) for _ in range(2))
            options: dict[str, Any] = {"t0": 1} if make is torch.optim.ASGD else {}
            pair = make([theirs], foreach=False, **options), TorchOptimizer([leaf], optimizer)
            for seed in range(6):
                for one, param in zip(pair, (theirs, leaf), strict=True):
                    param.grad = noise(seed, 5)
                    one.step()
            for key in {"mu_product", "eta", "mu"} & pair[0].state[theirs].keys():
                assert same_bits(pair[1].state[leaf][key], pair[0].state[theirs][key])
            assert same_bits(leaf, theirs)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_number_that_torch_has_loaded_in_another_dtype_is_read() -> None:
    """``from_torch`` reads a scalar that torch's ``load_state_dict`` has cast to another dtype."""
    param = nn.Parameter(noise(0, 3))
    live, again = (torch.optim.NAdam([param], foreach=False) for _ in range(2))
    param.grad = noise(1, 3)
    live.step()
    again.load_state_dict(live.state_dict())
    assert again.state[param]["mu_product"].dtype == torch.float64
    taken = from_torch(again).state.leaves[0]["0"].stages[-1].mu_product
    assert same_bits(taken, live.state[param]["mu_product"])


def test_adafactor_leaves_an_empty_parameter_at_which_torchs_fails() -> None:
    empty = nn.Parameter(torch.zeros(0, 3))
    empty.grad = torch.zeros(0, 3)
    with pytest.raises(ZeroDivisionError):
        torch.optim.Adafactor([empty]).step()
    param, state = steps(adafactor(), empty.detach(), lambda _: torch.zeros(0, 3), 2)
    assert param.shape == (0, 3)
    assert state.leaves.stages[-1].col_var[0].shape == (1, 3)
    with pytest.raises(ValueError, match=r"adafactor takes parameters of torch\.float32"):
        adafactor().init(torch.zeros(2, dtype=torch.complex64))
