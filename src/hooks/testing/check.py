"""``check_averager``: all laws over any averager, in one call."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from hypothesis import strategies as st

from functional_optim.testing.search import LawBroken, law_named, smallest_that_fails
from hooks.testing.averaging_laws import AVERAGING_LAWS
from hooks.testing.trainings import DTYPES, AveragerSubject, Factory, Training, trainings


def check_averager(
    factory: Factory,
    *,
    options: st.SearchStrategy[dict[str, Any]] | None = None,
    dtypes: Iterable[torch.dtype] = DTYPES,
    due: Callable[..., bool] | None = None,
    agree: bool = True,
    mean: bool = False,
    oracle: Factory | None = None,
    every_step: Mapping[str, Any] | None = None,
    ulps: float = 0.0,
    same_steps: int = 0,
    laws: Iterable[str] | None = None,
    max_examples: int = 20,
    derandomize: bool = True,
) -> None:
    """Property-test an averager by every law that its arguments allow.

    Ranks, from 1 to 4, are threads of this process. With ``x_r`` the parameters of rank ``r`` and
    ``c`` a point for each rank and step, each step is ``x_r <- x_r - (x_r - c) / 4`` and then
    ``average_parameters``. Hypothesis draws the number of ranks, shapes (0-d, empty), dtypes, steps
    and options.

    Args:
        factory: ``factory(params, group, **options)`` returns a :class:`~hooks.ModelAverager`.
        options: a strategy of keyword arguments for ``factory``, ``oracle`` and ``due``.
        dtypes: dtypes of the parameters.
        due: ``due(step, **options)``, for steps counted from 0: True if parameters are written
            after this step. None leaves out laws that need it.
        agree: True if all ranks then have the same parameters.
        mean: True if these are the mean over all ranks.
        oracle: another factory, whose averager gives the same parameters.
        every_step: options that average each step, such as ``{"period": 1}``.
        ulps: allowed distance from the oracle, and from the mean of float64 beyond that of a sum in
            rank order, in units in the last place of the largest number of the training.
        same_steps: number of first steps in which all ranks do the same, as in a warm-up.
        laws: names of the laws to check (see :data:`AVERAGING_LAWS`); by default all that apply.
        max_examples: number of trainings per law.
        derandomize: draw the same trainings each time; False to draw new ones.

    Raises:
        LawBroken: names the law and the smallest training found.
        ValueError: an unknown law, or a law that needs an argument that was not given.

    Example::

        >>> from hooks import PeriodicModelAverager
        >>> check_averager(
        ...     lambda params, group: PeriodicModelAverager(2, 1, group),
        ...     due=lambda step: step % 2 == 1, mean=True, max_examples=3)
    """
    subject = AveragerSubject(
        factory,
        st.just({}) if options is None else options,
        tuple(dtypes),
        due,
        agree,
        mean,
        oracle,
        every_step,
        ulps,
        same_steps,
    )
    apply = [name for name, law in AVERAGING_LAWS.items() if law.applies(subject)]
    for name in apply if laws is None else laws:
        check_averaging_law(name, subject, max_examples=max_examples, derandomize=derandomize)


def check_averaging_law(
    name: str, subject: AveragerSubject, *, max_examples: int = 20, derandomize: bool = True
) -> None:
    """Check one law over one subject.

    Args:
        name: of the law, a key of :data:`AVERAGING_LAWS`.
        subject: the averager, and its properties.
        max_examples: number of trainings.
        derandomize: draw the same trainings each time.

    Raises:
        LawBroken: with the smallest training found.
        ValueError: an unknown law, or a law that needs a field that is not set.

    Example::

        >>> from hooks import PeriodicModelAverager
        >>> subject = AveragerSubject(lambda params, group: PeriodicModelAverager(2, 1, group))
        >>> check_averaging_law("any moment", subject, max_examples=3)
    """
    law = law_named(name, AVERAGING_LAWS)
    if not law.applies(subject):
        raise ValueError(
            f"the law {name!r} needs {' and '.join(law.needs)} of the averager; say what it is, or "
            "leave the law out"
        )
    real = {torch.float32, torch.float64}
    dtypes = tuple(one for one in subject.dtypes if not law.real_only or one in real)

    def check(training: Training) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a period of 1
            law.check(subject, training)

    found = smallest_that_fails(
        trainings(subject.options, dtypes or subject.dtypes),
        check,
        max_examples=max_examples,
        derandomize=derandomize,
    )
    if found is not None:
        raise LawBroken(name, *found, law.check.__doc__) from found[1]
