"""The law of compiled loops: every case, with all its options, is the reference bit for bit."""

from dataclasses import replace

import pytest
import torch

from functional_optim.testing import CASES, CHAINS, check_law

TABLE = {**CASES, **CHAINS}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@pytest.mark.parametrize("name", TABLE)
def test_compiled_is_reference(name: str) -> None:
    for dtype in DTYPES:
        subject = replace(TABLE[name].subject(), dtypes=(dtype,))
        check_law("compiled is reference", subject, max_examples=8)
