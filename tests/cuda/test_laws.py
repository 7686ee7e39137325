"""The laws, on a device: the same table, the same laws."""

from dataclasses import replace

import pytest
import torch

from functional_optim.testing import LAWS, check_law
from tests.choices import case, examples
from tests.laws.support import TABLE

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

SLOW = {"compiled is reference", "traced is close"}
"""Of which each choice of options is compiled."""

USUAL = tuple(law for law in LAWS if law not in SLOW)
COMPILED = ("sgd", "adamw", "lion", "clip, decay, adam")


@pytest.mark.parametrize("name", TABLE)
def test_laws(name: str) -> None:
    subject = replace(TABLE[name].subject(), device="cuda")
    for law in USUAL:
        with case(law=law):
            check_law(law, subject, max_examples=examples(3).max_examples)


@pytest.mark.parametrize("name", [one for one in COMPILED if one in TABLE])
def test_compiled(name: str) -> None:
    subject = replace(TABLE[name].subject(), device="cuda")
    for law in SLOW:
        with case(law=law):
            check_law(law, subject, max_examples=examples(3).max_examples)
