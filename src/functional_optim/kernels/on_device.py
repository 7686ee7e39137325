"""Numbers that stand in 0-d tensors on a device: whether stages look at them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from functional_optim._torch import fake_tensor_mode
from functional_optim.core.hyper import mapped
from functional_optim.core.leaf import Leaf, Scalars, is_measured, require_kept
from functional_optim.core.stage import Stage
from functional_optim.kernels.chunks import tensors_of, with_tensors
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.reference import ReferenceExecutor


def require_unlooked(stages: Sequence[Stage], leaf: Leaf) -> None:
    """Make sure that stages do not look at their numbers, by numbers that cannot be looked at.

    Args:
        stages: of the chain.
        leaf: whose coefficients are tensors; nothing of it is read or written.

    Raises:
        UntraceableError: they do.
    """
    with fake_tensor_mode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        fake = with_tensors(leaf, [mode.from_tensor(tensor) for tensor in tensors_of(leaf)])
        coefficients = mapped(Tensor, mode.from_tensor, leaf.coefficients)
        total = torch.empty((), dtype=torch.float64, device=leaf.param.device)
        totals = [total] * sum(map(is_measured, stages))
        try:
            hidden = fake._replace(coefficients=coefficients, scalars=Scalars.DEVICE)
            require_kept(hidden, ReferenceExecutor().update(stages, [hidden], totals)[0])
        except Exception as error:
            line = str(error).strip().split("\n")[0]
            names = ", ".join(stage.name for stage in stages)
            raise UntraceableError(
                f"a chain ({names}) cannot be stepped with numbers that stand on a device "
                f"({type(error).__name__}: {line}): a rule computes with torch's functions and "
                "those of functional_optim.numeric, and looks neither at a number nor at data"
            ) from error
