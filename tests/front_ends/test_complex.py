"""``from_torch`` of complex parameters gives the bits of torch's class on their real view.

torch.optim also steps most complex parameters through their real view. SGD and coupled weight decay
add complex numbers instead, so they round in another way than on the real view.
"""

from typing import Any

import torch

from tests.choices import each

from .runs import Functional
from .support import CASES, assert_same_tensors, parameters, params_of, run, set_grads, twins

COMPLEX = [name for name, (cls, _) in CASES.items() if cls is not torch.optim.Adafactor]
"""Cases with complex parameters, which Adafactor refuses, here and in torch."""


def real(tensor: Any) -> Any:
    """Return a copy, as the real view if the tensor is complex."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().clone()


@each(name=COMPLEX)
def test_from_torch_is_torch_s_class_on_the_real_view(name: str) -> None:
    live = twins(name, torch.complex64).theirs
    run(live, 0, 1, without={1})
    made: Any = CASES[name][0]
    leaves = [torch.nn.Parameter(real(one)) for one in params_of(live)]
    twin = made(leaves, **CASES[name][1], foreach=False)
    written = live.state_dict()
    written["state"] = {
        number: {key: real(value) for key, value in entries.items()}
        for number, entries in written["state"].items()
    }
    twin.load_state_dict(written)
    ours = Functional(live)
    for seed in range(60, 63):
        given = parameters(1, torch.complex64)
        set_grads(given, seed)
        for param, one in zip(leaves, given, strict=True):
            param.grad = real(one.grad)
        ours.step(seed)
        twin.step()
        assert_same_tensors([real(one) for one in ours.params], leaves)
