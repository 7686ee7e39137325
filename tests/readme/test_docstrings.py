"""Tests that public names have docstrings, and that callable names have a runnable example."""

import inspect

import functional_optim
import functional_optim.testing
import hooks
import hooks.testing
from tests.choices import case

NO_EXAMPLE = {
    "LeafState": "a record, made by init",
    "State": "a record, made by init",
    "GateCounts": "a record, made by init",
    "Shared": "a record, made by init",
    "Link": "a record, made by calling a stage",
    "NoState": "a type alias",
    "functional_optim_map": "a mapping",
    "LAWS": "a mapping",
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
    "AVERAGING_LAWS": "a table",
    "AveragerSubject": "a record",
    "AveragingLaw": "a record",
    "Training": "a record that Hypothesis fills",
    "trainings": "a strategy, shown in check_averager",
}
PUBLIC = [
    (name, getattr(module, name))
    for module in (functional_optim, functional_optim.testing, hooks, hooks.testing)
    for name in module.__all__
]


def test_public_names_are_documented() -> None:
    for name, thing in PUBLIC:
        with case(name=name):
            if inspect.isclass(thing) or inspect.isfunction(thing):
                text = inspect.getdoc(thing) or ""
                assert len(text.splitlines()[0]) > 15
                assert ">>> " in text or name in NO_EXAMPLE, "it has no runnable example"
            else:
                assert name in NO_EXAMPLE


def test_public_functions_document_their_arguments() -> None:
    for name, thing in PUBLIC:
        if inspect.isfunction(thing):
            text = inspect.getdoc(thing) or ""
            for argument in inspect.signature(thing).parameters:
                with case(name=name, argument=argument):
                    assert f"{argument}:" in text or argument == "draw"


def test_algorithms_tell_their_whole_story() -> None:
    for name in functional_optim.algorithms.__all__:
        made = getattr(functional_optim, name)
        module = inspect.getmodule(made)
        with case(name=name):
            for part in ("Args:", "Returns:", "Raises:", "Example::", "Reference:"):
                assert part in (inspect.getdoc(made) or "")
            assert module is not None
            assert "p_t = " in (module.__doc__ or "")
