"""What is public is documented: a docstring each, and a runnable example where one can call it."""

import inspect
from types import ModuleType

import pytest

import functional_optim
import functional_optim.testing
import hooks

NO_EXAMPLE = {
    "LeafState": "a record, made by init",
    "State": "a record, made by init",
    "Link": "a record, made by calling a stage",
    "NoState": "a type alias",
    "functional_optim_map": "a mapping",
    "CASES": "a mapping",
    "CHAINS": "a mapping",
    "LAWS": "a mapping",
    "Case": "a record of the table of cases",
    "Law": "a record",
    "LawBroken": "raised, not called",
    "LawNotTried": "raised, not called",
    "LeafSpec": "a record that Hypothesis fills",
    "Run": "a record that Hypothesis fills",
    "Values": "a record that Hypothesis fills",
    "Subject": "a record",
    "runs": "a strategy, shown in check_optimizer",
    "check_law": "one law of check_optimizer, which has the example",
    "laid_out": "a helper of Run",
}
PUBLIC = [
    (module, name)
    for module in (functional_optim, functional_optim.testing, hooks)
    for name in module.__all__
]


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_public_name_is_documented(module: ModuleType, name: str) -> None:
    thing = getattr(module, name)
    if not (inspect.isclass(thing) or inspect.isfunction(thing)):
        assert name in NO_EXAMPLE
        return
    text = inspect.getdoc(thing) or ""
    assert len(text.splitlines()[0]) > 15
    assert ">>> " in text or name in NO_EXAMPLE, f"{name} has no runnable example"


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_public_constructor_documents_its_arguments(module: ModuleType, name: str) -> None:
    thing = getattr(module, name)
    if not inspect.isfunction(thing):
        return
    text = inspect.getdoc(thing) or ""
    for argument in inspect.signature(thing).parameters:
        assert f"{argument}:" in text or argument == "draw", f"{name}: {argument} is not described"


@pytest.mark.parametrize("name", functional_optim.algorithms.__all__)
def test_algorithm_tells_its_whole_story(name: str) -> None:
    text = inspect.getdoc(getattr(functional_optim, name)) or ""
    for part in ("Args:", "Returns:", "Raises:", "Example::", "Reference:"):
        assert part in text
    module = inspect.getmodule(getattr(functional_optim, name))
    assert module is not None
    assert "p_t = " in (module.__doc__ or "")
