"""``check_optimizer``: all laws over any optimizer, in one call."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from functional_optim.kernels.errors import NotPureError, UnscriptableError
from functional_optim.optimizer import Optimizer
from functional_optim.testing.laws import LAWS
from functional_optim.testing.runs import REAL_DTYPES, WIDE_SHAPE, Run, replay_steps, runs
from functional_optim.testing.search import LawBroken, law_named, smallest_that_fails
from functional_optim.testing.subject import Oracle, Subject, plain_oracle


class LawNotTried(Exception):  # noqa: N818  the name of the outcome
    """Error for a law that could not be tried, because the optimizer refuses the run.

    For instance, the rule refuses a dtype or a shape, or TorchScript refuses the rule. ``law`` is
    the name of the law, ``example`` is the refused run, and the cause is the refusal.

    Example::

        >>> from functional_optim import muon
        >>> try:
        ...     check_optimizer(muon, laws=["pure"], dtypes=[torch.float32])  # needs matrices=True
        ... except LawNotTried as error:
        ...     print(error.law)
        pure
    """

    def __init__(self, law: str, example: Run, reason: BaseException) -> None:
        self.law = law
        self.example = example
        way_out = (
            "or check the other laws, with scripted=False"
            if isinstance(reason, UnscriptableError)
            else "the reference executor refuses it too, so this law was not tried. Change the "
            "optimizer, or limit what is tried with dtypes=, options=, matrices=, names= or laws="
        )
        super().__init__(
            f"the law {law!r} cannot be tried: {type(reason).__name__}: {reason}\n{way_out}\n"
            f"smallest example:\n{example}"
        )


MISSING_HINT = (
    "Without missing gradients the law holds. A class that counts steps for a whole parameter "
    "group counts them for a parameter without a gradient too; here each parameter has its own "
    "count. If that is the difference, pass missing=False."
)
"""Added to a report if only runs with missing gradients break the law."""


class _RefusedError(Exception):
    """Error for a run that the optimizer refuses, whatever the law. The cause is the refusal."""


def check_optimizer(
    factory: Callable[..., Optimizer],
    oracle: Oracle | None = None,
    *,
    options: st.SearchStrategy[dict[str, Any]] | None = None,
    dtypes: Iterable[torch.dtype] = REAL_DTYPES,
    ulps: float = 0.0,
    scripted: bool = True,
    matrices: bool = False,
    one_chain: bool | None = None,
    device: str = "cpu",
    missing: bool = True,
    names: Iterable[str] = (),
    laws: Iterable[str] | None = None,
    max_examples: int = 30,
    derandomize: bool = True,
) -> None:
    """Property-test an optimizer by every law.

    The laws are about purity, agreement with an oracle, executors, splits, resuming, None
    gradients, complex parameters, non-finite gradients, and torch.func.

    Hypothesis draws parameters, gradients and options, over shapes (0-d, empty, non-contiguous,
    large), dtypes, numbers of steps, and missing gradients. Inputs of a stage per leaf are computed
    from the gradients.

    Args:
        factory: ``factory(**options)`` returns an :class:`~functional_optim.Optimizer`.
        oracle: a torch.optim class, or a function ``(params, **options)`` that returns a
            torch.optim optimizer. For torch's own classes, ``foreach=False`` is passed.
        options: a strategy of keyword arguments for ``factory`` and ``oracle``.
        dtypes: dtypes of the parameters.
        ulps: allowed distance from the oracle, in units in the last place of the largest
            magnitude of a tensor; 0 is bit for bit.
        scripted: False leaves out the laws about TorchScript.
        matrices: True draws real 2-d parameters only, and leaves out the law about complex
            parameters.
        one_chain: deprecated, and without effect. Laws about ``bind``, TorchScript programs and
            CUDA graphs do not apply to an optimizer whose leaves have different stages, such as
            :func:`~functional_optim.partition`.
        device: of the parameters. On ``"cuda"`` the results of kernels must be within the stated
            bound. On the CPU they must have the bits of the reference.
        missing: True also compares with the oracle in runs with missing gradients. Pass False for
            a class that counts steps per parameter group, so that it counts steps of parameters
            without a gradient too. All other laws draw missing gradients in any case.
        names: of the first parameters, for an optimizer that selects by name. A run has up to three
            parameters. Parameters without a name here are called a, b and c.
        laws: names of the laws to check (see :data:`LAWS`); by default all that apply, except those
            that compile code.
        max_examples: number of runs for each law.
        derandomize: draw the same runs each time; False draws other runs.

    Raises:
        LawBroken: names the law, and the smallest example found.
        LawNotTried: the optimizer refuses the run. For instance, its rule has no kernel for a
            dtype, or TorchScript cannot compile it.
        ValueError: a law that does not exist.

    Example::

        >>> import torch
        >>> from functional_optim import sgd
        >>> check_optimizer(sgd, oracle=torch.optim.SGD, max_examples=5)
    """
    if one_chain is not None:
        warnings.warn(
            "check_optimizer(one_chain=) is deprecated: leave it out, this is found out for each "
            "optimizer",
            DeprecationWarning,
            stacklevel=2,
        )
    subject = Subject(
        factory,
        plain_oracle(oracle),
        st.just({}) if options is None else options,
        tuple(dtypes),
        ulps,
        scripted,
        matrices=matrices,
        device=device,
        missing=missing,
        names=tuple(names),
    )
    usual = [name for name, law in LAWS.items() if not law.slow]
    chosen = usual if laws is None else list(laws)
    for name in chosen:
        check_law(name, subject, max_examples=max_examples, derandomize=derandomize)


def check_law(
    name: str, subject: Subject, *, max_examples: int = 30, derandomize: bool = True
) -> None:
    """Check one law over one subject; do nothing if the law does not apply.

    Args:
        name: of the law, a key of :data:`LAWS`.
        subject: the optimizer and its oracle.
        max_examples: number of runs.
        derandomize: draw the same runs each time.

    Raises:
        LawBroken: with the smallest example found.
        LawNotTried: the optimizer refuses the run.
        ValueError: a law that does not exist.

    Example::

        >>> from functional_optim import sgd
        >>> check_law("pure", Subject(sgd), max_examples=2)
    """
    law = law_named(name, LAWS)
    if not law.concerns(subject):
        return
    dtypes = subject.dtypes
    if law.complex_only:
        dtypes = (torch.complex64,)
    elif law.double_only:
        dtypes = (torch.float64,)
    elif law.not_16_bit:
        dtypes = tuple(dtype for dtype in dtypes if dtype.itemsize > 2)
        if not dtypes:
            return
    # Small tensors first: Hypothesis does not shrink large tensors to a few numbers.
    shapes = subject.shapes()
    if law.small_only:
        shapes = tuple(one for one in shapes if one != WIDE_SHAPE)
    small = _RunSource(subject, dtypes, {"large": False, "shapes": shapes})
    draws_large = not law.small_only and not subject.matrices
    if max_examples > 1 or not draws_large:  # the first run is the simplest of all
        _search(name, small, max_examples, derandomize)
    if draws_large:
        some = max(min(3, max_examples + 1), max_examples // 5)
        _search(name, _RunSource(subject, dtypes, {}), some, derandomize)


class _RunSource(NamedTuple):
    """Subject, dtypes and sizes of the runs to draw."""

    subject: Subject
    dtypes: tuple[torch.dtype, ...]
    sizes: dict[str, Any]

    def runs(self, *, missing: bool) -> st.SearchStrategy[Run]:
        subject = self.subject
        return runs(
            subject.options,
            self.dtypes,
            max_steps=subject.max_steps,
            missing=missing,
            device=subject.device,
            names=subject.names,
            **self.sizes,
        )


def _search(name: str, source: _RunSource, max_examples: int, derandomize: bool) -> None:
    """Raise an error with the smallest run that breaks a law, or that the optimizer refuses."""
    subject, of_oracle = source.subject, LAWS[name].needs_oracle
    missing = subject.missing or not of_oracle

    def smallest(*, missing: bool) -> tuple[Run, Exception] | None:
        return smallest_that_fails(
            source.runs(missing=missing),
            lambda run: _try_law(name, subject, run),
            max_examples=max_examples,
            derandomize=derandomize,
        )

    found = smallest(missing=missing)
    if found is None:
        return
    example, reason = found
    if isinstance(reason, _RefusedError):
        assert reason.__cause__ is not None
        raise LawNotTried(name, example, reason.__cause__) from reason.__cause__
    lacks_gradients = of_oracle and any(None in step for step in example.steps)
    hint = MISSING_HINT if lacks_gradients and smallest(missing=False) is None else ""
    raise LawBroken(name, example, reason, LAWS[name].check.__doc__, hint) from reason


def _try_law(name: str, subject: Subject, run: Run) -> None:
    """Check one law over one run."""
    try:
        LAWS[name].check(subject, run)
    except (AssertionError, NotPureError):
        raise
    except UnscriptableError as error:
        raise _RefusedError from error
    except Exception:
        try:
            replay_steps(subject.build(run).using(executor="reference"), run.params(), run.grads())
        except Exception as refusal:
            raise _RefusedError from refusal
        raise
