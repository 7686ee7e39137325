"""Each private part of torch behaves as expected, and so does our code without that part.

A failure of the first test says what torch has changed.
"""

import sys
from types import SimpleNamespace

import pytest
import torch

from functional_optim import adam
from functional_optim._torch import derivatives
from functional_optim.algorithms.adam import ADAM
from functional_optim.kernels.fused_kernel import FUSED
from functional_optim.kernels.kernel import KernelError

from . import several, single, tracing
from .finder import known_names
from .table import ROWS, all_names, hide, loaded_anew
from .test_one_place import THERE

assert single and several and tracing, "they fill the table"

pytestmark = [  # torch itself warns at the first jvp and the first RPC world
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:You are using a Backend:UserWarning"),
]


@pytest.mark.parametrize("name", ROWS)
def test_torch_is_as_it_is_relied_on(name: str) -> None:
    there = ", ".join(one for _, one in ROWS[name].names)
    changed = f"torch {torch.__version__} has changed {there}: see functional_optim/_torch"
    for owner, one in ROWS[name].names:
        assert isinstance(owner, str) or hasattr(owner, one), changed
    try:
        ROWS[name].holds(all_names())
    except Exception as error:
        error.add_note(changed)
        raise


@pytest.mark.parametrize("name", ROWS)
def test_without_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS[name]
    with monkeypatch.context() as patch:
        for owner, one in row.names:
            if not isinstance(owner, str):
                hide(owner, one, patch)
        with loaded_anew() as names:
            if row.refuses is None:
                row.holds(names)
                return
            with pytest.raises(ImportError) as raised:
                row.refuses(names)
    said = str(raised.value)
    assert said.startswith(f"torch {torch.__version__} has no torch.")
    assert any(one in said for _, one in row.names)
    assert said.endswith(", or install torch 2.13, which has it")


def test_tangents_without_the_number_of_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    public = SimpleNamespace(unpack_dual=derivatives.forward_ad.unpack_dual)
    monkeypatch.setattr(derivatives, "forward_ad", public)
    tracing.tangents(all_names())


def test_every_name_has_a_row() -> None:
    entered = {one for row in ROWS.values() for _, one in row.names}
    assert known_names(THERE.values()) - entered - {"_C"} == set()


def test_a_package_loaded_anew_leaves_no_trace() -> None:
    before = all_names()
    with loaded_anew() as names:
        assert names.copy_module is not before.copy_module
    assert all_names() == before


def test_without_a_module_that_is_imported_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._subclasses.fake_tensor", None)
    with pytest.raises(ImportError, match=r"has no torch\._subclasses\.fake_tensor"):
        all_names().fake_tensor_mode()


def test_a_fused_kernel_that_is_not_there_is_refused_before_a_step(
    fused_on_the_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(torch, "_fused_adamw_")
        with loaded_anew() as names:
            why = names.why_missing(names.fused_adam_, names.fused_adamw_)
    monkeypatch.setitem(FUSED, ADAM, FUSED[ADAM]._replace(missing=why))
    optimizer = adam(lr=0.1).using(executor="fused")
    params = [torch.ones(3)]
    state = optimizer.init(params)
    with pytest.raises(KernelError, match=r"has no torch\._fused_adamw_, and without it"):
        optimizer.update_(params, [torch.ones(3)], state)
    assert params[0].tolist() == [1.0, 1.0, 1.0]
    assert [int(one) for one in torch.utils._pytree.tree_leaves(state)[:1]] == [0]
