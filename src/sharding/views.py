"""Views of what a rank owns: whole parameters, blocks, and ranges of elements."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from sharding.ownership import OwnedRange
from sharding.spec import ParameterSpec, Specs


def views_of(
    specs: Specs, owned: Sequence[OwnedRange], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return what a rank steps of each parameter that it owns: see ``ShardPlan.views``.

    Raises:
        ValueError: a tensor is missing, has another shape, or is not contiguous and cut.
    """
    found: dict[str, Tensor] = {}
    for one in owned:
        spec = specs[one.parameter]
        tensor = _tensor(spec, tensors)
        if one.whole and spec.blocks is None:
            found[one.path] = tensor
            continue
        if not tensor.is_contiguous():
            raise ValueError(
                f"{one.path!r} is cut, and its elements do not have the order of its shape "
                f"(strides {tensor.stride()}); give a contiguous tensor"
            )
        if spec.blocks is None:
            found[f"{one.path}[{one.start}:{one.stop}]"] = tensor.view(-1)[one.start : one.stop]
            continue
        bounds = spec.bounds
        for number, block in enumerate(spec.blocks.split(tensor)):
            if one.start <= bounds[number] and bounds[number + 1] <= one.stop:
                found[f"{one.path}[{number}]"] = block
    return found


def _tensor(spec: ParameterSpec, tensors: Mapping[str, Tensor]) -> Tensor:
    if spec.path not in tensors:
        raise ValueError(f"there is no tensor of {spec.path!r}; give one for each parameter owned")
    tensor = tensors[spec.path]
    if tuple(tensor.shape) != spec.shape:
        raise ValueError(
            f"{spec.path!r} has shape {tuple(tensor.shape)}, and {spec.shape} in the plan; give "
            "the tensors that the plan was made for"
        )
    return tensor
