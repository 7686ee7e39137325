"""L-BFGS: Liu & Nocedal 1989; Nocedal & Wright 2006, algorithms 7.4 and 7.5.

    s_k = x_{k+1} - x_k,   y_k = g_{k+1} - g_k,   rho_k = 1 / (y_k . s_k)
    gamma = (y . s) / (y . y)                     (of the newest pair, equation 7.20)
    d = -H g                                      (H by the two-loop recursion, from gamma I)
    x_{k+1} = x_k + t d

The step ``t`` is ``lr``, or a line search that starts at ``lr`` finds it. In the very first
iteration, ``min(1, 1 / |g|_1) lr`` replaces ``lr``. Defaults and the order of all operations are
those of torch.optim.LBFGS.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.algorithms.line_search import Trial, strong_wolfe
from functional_optim.bounds import ANY, FINITE_NON_NEGATIVE, Interval
from functional_optim.core.closure_optimizer import (
    ClosureOptimizer,
    ClosureProblem,
    ClosureRule,
    Point,
)
from functional_optim.core.constructor import with_constructor_errors

STRONG_WOLFE = "strong_wolfe"

CURVATURE = 1e-10
"""A pair enters the history if ``y . s`` is larger."""


class LBFGSHyper(NamedTuple):
    lr: float  # step length, or the first one that the line search tries
    max_iter: int  # iterations in a step
    max_eval: int  # evaluations of the loss in a step
    tolerance_grad: float  # end when the largest magnitude in the gradient is at most this
    tolerance_change: float  # end when parameters, or loss, change by less
    history_size: int  # pairs in the history
    line_search_fn: str | None  # "strong_wolfe", or None for a fixed step


class LBFGSState(NamedTuple):
    """State of L-BFGS. All vectors are flat, over all parameters; None before the first step."""

    d: Tensor | None = None  # the last direction
    t: Any = None  # float or 0-d tensor, the last step along it
    old_dirs: tuple[Tensor, ...] = ()  # y of the history, oldest first
    old_stps: tuple[Tensor, ...] = ()  # s of the history
    ro: tuple[Tensor, ...] = ()  # 1 / (y . s) of the history, 0-d
    H_diag: Any = None  # 0-d tensor, or 1 without a history: gamma
    prev_flat_grad: Tensor | None = None  # gradient before the last iteration
    prev_loss: float | None = None  # loss before the last iteration
    n_iter: int = 0  # iterations so far, in all steps
    func_evals: int = 0  # evaluations so far, in all steps
    checksum: int = 0  # of names and shapes of the parameters


def with_pair(state: LBFGSState, y: Tensor, s: Tensor, history_size: int) -> LBFGSState:
    """Return the state with one more pair, unless its curvature is too small."""
    curvature = y.dot(s)
    if not curvature > CURVATURE:
        return state
    keep = slice(1 if len(state.old_dirs) >= history_size else 0, None)
    return state._replace(
        old_dirs=(*state.old_dirs[keep], y),
        old_stps=(*state.old_stps[keep], s),
        ro=(*state.ro[keep], 1.0 / curvature),
        H_diag=curvature / y.dot(y),
    )


def two_loop_direction(grad: Tensor, state: LBFGSState) -> Tensor:
    """Return ``-H grad``, where the history defines the inverse Hessian H (algorithm 7.4)."""
    history = list(zip(state.old_dirs, state.old_stps, state.ro, strict=True))
    q = -grad
    weights = []
    for y, s, rho in reversed(history):
        alpha = s.dot(q) * rho
        q = torch.add(q, y, alpha=-float(alpha))
        weights.append(alpha)
    r: Tensor = q * state.H_diag
    for (y, s, rho), alpha in zip(history, reversed(weights), strict=True):
        beta = y.dot(r) * rho
        r = torch.add(r, s, alpha=float(alpha - beta))
    return r


def lbfgs_direction(grad: Tensor, state: LBFGSState, history_size: int) -> LBFGSState:
    """Return the state with the direction of the next iteration."""
    if state.n_iter == 0:
        return state._replace(d=-grad, old_dirs=(), old_stps=(), ro=(), H_diag=1)
    before, last = state.prev_flat_grad, state.d
    assert before is not None
    assert last is not None, "an iteration came before"
    state = with_pair(state, grad - before, last * state.t, history_size)
    return state._replace(d=two_loop_direction(grad, state))


def lbfgs_step(
    problem: ClosureProblem,
    point: Point,
    loss: float,
    grad: Tensor,
    state: LBFGSState,
    hyper: LBFGSHyper,
) -> tuple[Point, LBFGSState]:
    """Iterate until a tolerance or a limit is reached.

    ``loss`` and ``grad`` at the start count as the first evaluation.
    """
    evaluations = 1
    is_optimal = bool(grad.abs().max() <= hyper.tolerance_grad)
    for iteration in range(1, hyper.max_iter + 1):
        if is_optimal:
            break
        state = lbfgs_direction(grad, state, hyper.history_size)
        d: Any = state.d
        t: Any = hyper.lr
        if state.n_iter == 0:
            most: Any = 1.0 / grad.abs().sum()
            t = min(1.0, most) * hyper.lr
        state = state._replace(prev_flat_grad=grad, prev_loss=loss, n_iter=state.n_iter + 1, t=t)
        slope = grad.dot(d)
        if slope > -hyper.tolerance_change:
            break
        before, is_last = loss, iteration == hyper.max_iter
        if hyper.line_search_fn == STRONG_WOLFE:
            trial, count = strong_wolfe(
                functools.partial(_trial, problem, point, d),
                Trial(0, loss, grad, slope),
                t,
                d.abs().max(),
                limit=hyper.max_eval - evaluations,
            )
            t, loss, grad, evaluations = trial.t, trial.loss, trial.grad, evaluations + count
            state = state._replace(t=t)
            point = problem.move(point, t, d)
        else:
            point = problem.move(point, t, d)
            if not is_last:  # nothing reads the loss after the last iteration
                (loss, grad), evaluations = problem.evaluate(point), evaluations + 1
                point = problem.read(point)
        if is_last or evaluations >= hyper.max_eval:
            break
        is_optimal = bool(grad.abs().max() <= hyper.tolerance_grad)
        is_small = (d * t).abs().max() <= hyper.tolerance_change
        if is_small or abs(loss - before) < hyper.tolerance_change:
            break
    return point, state._replace(func_evals=state.func_evals + evaluations)


def _trial(problem: ClosureProblem, point: Point, d: Tensor, t: Any) -> Trial:
    loss, grad = problem.evaluate(problem.move(point, t, d))
    return Trial(t, loss, grad, grad.dot(d))


def _check(hyper: LBFGSHyper) -> None:
    if hyper.line_search_fn not in (None, STRONG_WOLFE):
        raise ValueError(
            f"lbfgs: line_search_fn must be None or {STRONG_WOLFE!r}, got {hyper.line_search_fn!r}"
        )
    if hyper.line_search_fn == STRONG_WOLFE and hyper.lr == 0:
        raise ValueError("lbfgs: lr must be > 0 with a line search, whose first step it is, got 0")


def _vector(state: LBFGSState) -> Tensor | None:
    return state.d


LBFGS = ClosureRule(
    name="lbfgs",
    hyper=LBFGSHyper,
    state=LBFGSState,
    step=lbfgs_step,
    vector=_vector,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("max_iter", Interval(low=0)),
        ("max_eval", Interval(low=0)),
        ("tolerance_grad", ANY),
        ("tolerance_change", ANY),
        ("history_size", Interval(low=1)),
    ),
    check=_check,
)

torch.serialization.add_safe_globals([LBFGSState])


@with_constructor_errors
def lbfgs(
    lr: float | Tensor = 1.0,
    max_iter: int = 20,
    max_eval: int | None = None,
    tolerance_grad: float = 1e-7,
    tolerance_change: float = 1e-9,
    history_size: int = 100,
    line_search_fn: str | None = None,
) -> ClosureOptimizer:
    """L-BFGS: a quasi-Newton method that remembers the last steps and changes of the gradient.

    ``s = x' - x`` and ``y = g' - g`` of the last iterations define an inverse Hessian ``H``, and
    ``d = -H g`` is the direction of the next one (two-loop recursion). ``x' = x + t * d``, where
    ``t`` is ``lr``, or a step that fulfils the strong Wolfe conditions. One step makes up to
    ``max_iter`` iterations, and each evaluates the loss at least once.

    It is for small deterministic problems, where all data fits into one evaluation. On mini-batches
    the differences of gradients are mostly noise.

    Args:
        lr: step along the direction, or the first step that the line search tries, a finite number
            >= 0 (> 0 with a line search); it may be a 0-d tensor.
        max_iter: iterations in one step, >= 0.
        max_eval: evaluations of the loss in one step, >= 0; by default ``max_iter * 5 // 4``. It is
            checked between iterations, and bounds the line search.
        tolerance_grad: the step ends when the largest magnitude in the gradient is at most this.
        tolerance_change: the step ends when parameters, or the loss, change by less. In the line
            search the tolerance is 1e-9, as in torch.
        history_size: pairs ``(s, y)`` that are kept, >= 1.
        line_search_fn: None for a fixed step, or ``"strong_wolfe"``.

    Returns:
        A :class:`~functional_optim.ClosureOptimizer`: ``update`` takes ``value_and_grad=``, and
        ``TorchOptimizer(...).step`` a closure. Parameters and state are those of torch.optim.LBFGS,
        bit for bit on the CPU. A complex parameter counts as two real ones, a missing gradient as
        zeros; a sparse gradient is made dense. State: ``2 * history_size + 2`` vectors as long as
        all parameters together, 808 bytes per float32 parameter when the default history is full.
        An iteration costs ``4 * history_size`` passes over such vectors, and the evaluations.

    Raises:
        TypeError: a schedule.
        ValueError: a value outside the bounds above.

    Example::

        >>> import torch
        >>> def rosenbrock(x):
        ...     return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2
        >>> def value_and_grad(x):
        ...     grad, loss = torch.func.grad_and_value(rosenbrock)(x)
        ...     return loss, grad
        >>> optimizer = lbfgs(max_iter=100, line_search_fn="strong_wolfe")
        >>> x = torch.tensor([-1.5, 2.0], dtype=torch.float64)
        >>> x, state = optimizer.update(x, None, optimizer.init(x), value_and_grad=value_and_grad)
        >>> torch.allclose(x, torch.ones(2, dtype=torch.float64))
        True

    Reference:
        Liu & Nocedal, "On the limited memory BFGS method for large scale optimization",
        Mathematical Programming 45, 1989; Nocedal & Wright, "Numerical Optimization", 2nd edition,
        2006, algorithms 3.5, 3.6, 7.4 and 7.5.
    """
    if max_eval is None and isinstance(max_iter, int):
        max_eval = max_iter * 5 // 4
    return LBFGS(
        lr=lr,
        max_iter=max_iter,
        max_eval=max_eval,
        tolerance_grad=tolerance_grad,
        tolerance_change=tolerance_change,
        history_size=history_size,
        line_search_fn=line_search_fn,
    )
