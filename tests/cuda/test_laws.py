"""Tests of the laws on a device, for the same table of optimizers as on the CPU."""

from dataclasses import replace

import pytest
import torch

from functional_optim.testing import LAWS, LawBroken, LawNotTried, check_law
from tests.choices import examples
from tests.laws.support import TABLE

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

SLOW = ("compiled is reference", "traced is close")
"""Laws that compile each choice of options."""

USUAL = tuple(law for law in LAWS if law not in SLOW)
COMPILED = ("sgd", "adamw", "lion", "clip_by_global_norm, adamw")


@pytest.mark.parametrize("name", TABLE)
def test_laws(name: str) -> None:
    subject = replace(TABLE[name].subject(), device="cuda")
    broken = []
    for law in [law for law in USUAL if LAWS[law].concerns(subject)]:
        try:
            check_law(law, subject, max_examples=examples(3).max_examples)
        except (LawBroken, LawNotTried) as error:
            broken.append(str(error))
    assert not broken, "\n\n".join(broken)


@pytest.mark.parametrize("law", SLOW)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name: str, law: str) -> None:
    subject = replace(TABLE[name].subject(), device="cuda")
    check_law(law, subject, max_examples=examples(3).max_examples)
