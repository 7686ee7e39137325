"""The laws of state: under its names it is the same."""

from functional_optim.testing.compare import require_same
from functional_optim.testing.runs import Run
from functional_optim.testing.subject import Subject, named_state
from functional_optim.torch_state import from_entries


def named(subject: Subject, run: Run) -> None:
    """By the names that dicts and checkpoints have for its tensors, a state is found again."""
    optimizer, params = subject.build(run), run.params()
    state = optimizer.init(params)
    hypers = optimizer.hypers_at(())
    for grads in run.grads():
        params, state = optimizer.update(params, grads, state)
        for name, leaf in state.leaves.items():
            if int(leaf.step) == 0:
                continue  # it is made anew, for the options of then
            entries = named_state(optimizer, params[name], leaf)
            again = from_entries(optimizer.stages, hypers, params[name], entries, name)
            require_same(f"the state of {name!r} and that of its names", again, leaf)
