"""The law of the compiled executor: every case with its default options, some with others.

Each choice of options, and each dtype, is a program of its own and takes seconds to compile.
"""

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from functional_optim.executors.compiler import COMPILER, compilations
from functional_optim.testing import CASES, CHAINS, check_law
from functional_optim.testing.subject import Subject

TABLE = {**CASES, **CHAINS}
OPTIONS: list[tuple[str, dict[str, Any], tuple[torch.dtype, ...]]] = [
    *((name, {}, (torch.float32,)) for name in TABLE if name not in ("adam", "sgd")),
    ("adamw", {}, (torch.float64,)),
    ("adam", {"amsgrad": True, "maximize": True, "weight_decay": 0.1}, (torch.float32,)),
    ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, (torch.float32,)),
    ("rmsprop", {"momentum": 0.9, "centered": True}, (torch.float32,)),
    ("qhm", {"weight_decay": 0.1, "weight_decay_type": "direct"}, (torch.bfloat16,)),
]


@pytest.mark.parametrize(("name", "options", "dtypes"), OPTIONS)
def test_compiled_is_close(
    name: str, options: dict[str, Any], dtypes: tuple[torch.dtype, ...]
) -> None:
    subject = Subject(TABLE[name].factory, options=st.just(options), dtypes=dtypes)
    COMPILER.idle()  # what other tests have left in the background is not counted here
    before = compilations()
    check_law("compiled is close", subject)
    assert compilations() - before <= 1  # for all sizes, steps and numbers of parameters
