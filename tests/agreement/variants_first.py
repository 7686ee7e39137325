"""Other implementations with one change each, for the experiments that show a cause."""

from typing import Any


def rprop_of_this_step(learning_rate: float) -> Any:
    """Return optax's Rprop that applies the update of this step, not of the last step."""
    import jax
    import optax

    inner = optax.scale_by_rprop(learning_rate)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        _, state = inner.update(grads, state, params)
        return jax.tree.map(lambda one: -one, state.prev_updates), state

    return optax.GradientTransformation(inner.init, update)


def sophia_with_this_hessian(**options: Any) -> Any:
    """Return optax's Sophia that uses this step's Hessian average, without a bias correction."""
    import optax

    inner = optax.contrib.sophia(**options)
    late = 10**6  # after so many steps, the bias correction divides by 1

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        _, made = inner.update(grads, state, params)
        first = state[0]._replace(nu=made[0].nu, count=first_count(state[0].count, late))
        updates, _ = inner.update(grads, (first, *state[1:]), params)
        return updates, made

    return optax.GradientTransformation(inner.init, update)


def first_count(count: Any, value: int) -> Any:
    """Return a constant of the type of a step count."""
    return count * 0 + value
