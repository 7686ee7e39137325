"""The text of one TorchScript program for a chain.

TorchScript has no closures and no lists of functions, so a chain becomes source text: each
stage's functions are called by name in a namespace that holds them. The text calls the stages;
it contains none of their mathematics.
"""

from collections.abc import Sequence
from string import Template

from functional_optim.core.calling import renews_raw
from functional_optim.core.leaf import is_measured, segments
from functional_optim.core.stage import Rule, Stage, Transform, same_coefficients
from functional_optim.kernels.script_flat import (
    OVERLAP,
    ProgramChunk,
    before_leaves,
    chunk_source,
    for_leaf,
)


def _stateful(stages: Sequence[Stage], within: range | None = None) -> list[int]:
    return [i for i in within or range(len(stages)) if stages[i].stateful]


def coefficient_tuple(stages: Sequence[Stage]) -> str:
    """The type of a chain's coefficients."""
    return "Tuple[" + ", ".join(f"Coefficients_{i}" for i in range(len(stages))) + "]"


def _segment(stages: Sequence[Stage], number: int, part: range) -> str:
    """One leaf through the stages of one segment."""
    states = _stateful(stages, part)
    carried = _carries_raw(stages)
    arguments = "".join(f", s{i}: State_{i}" for i in states)
    outputs = ", ".join(["Tensor"] * (2 + carried) + [f"State_{i}" for i in states])
    head = (
        f"def segment_{number}(param: Tensor, grad: Tensor, raw: Tensor, "
        f"c: {coefficient_tuple(stages)}, totals: List[Tensor]{arguments}) -> Tuple[{outputs}]:"
    )
    lines = [head]
    for i in part:
        state = f"s{i}" if stages[i].stateful else "()"
        kept = f"n{i}" if stages[i].stateful else f"_{i}"
        if isinstance(stages[i], Rule):
            lines.append(f"    param, {kept} = apply_{i}(param, grad, {state}, c[{i}])")
        else:
            more = ", totals[-1].to(grad.device)" if is_measured(stages[i]) else ""
            more += ", raw" if _is_raw(stages[i]) else ""
            lines.append(f"    grad, {kept} = apply_{i}(grad, param, {state}, c[{i}]{more})")
        if renews_raw(stages[i]):
            lines.append("    raw = grad")
    made = ["param", "grad", *(["raw"] if carried else []), *(f"n{i}" for i in states)]
    lines.append("    return " + ", ".join(made))
    return "\n".join(lines)


def _carries_raw(stages: Sequence[Stage]) -> bool:
    """Whether a stage takes a raw gradient that is made in an earlier segment than its own."""
    return any(
        _is_raw(stages[i]) and any(map(renews_raw, stages[: part.start]))
        for part in segments(stages)
        for i in part
    )


def _is_raw(stage: Stage) -> bool:
    return isinstance(stage, Transform) and stage.raw


def _measure(i: int) -> str:
    return (
        f"def total_{i}(grads: List[Tensor]) -> Tensor:\n"
        "    total = torch.zeros((), dtype=torch.float64, device='cpu')\n"
        "    for grad in grads:\n"
        f"        total = total + measure_{i}(grad).to(total.device)\n"
        "    return total"
    )


def _run(stages: Sequence[Stage], in_place: bool, chunks: Sequence[ProgramChunk] = ()) -> str:
    """All leaves through all segments; the last one writes, or gathers, the results.

    Leaves that fit a chunk are stepped by it.
    """
    states = _stateful(stages)
    result = ", ".join(["Tensor", *(f"State_{i}" for i in states)])
    arguments = "".join(f", s{i}: List[State_{i}]" for i in states)
    head = (
        f"def run{'_' if in_place else ''}(params: List[Tensor], grads: List[Tensor], "
        f"coefficients: List[{coefficient_tuple(stages)}], which: List[int], "
        f"measured: List[Tensor]{arguments}) -> "
        f"{'None' if in_place else f'List[Tuple[{result}]]'}:"
    )
    lines = [head, "    ps = params", "    gs = grads", "    totals: List[Tensor] = []"]
    if _carries_raw(stages):
        lines.append("    rs = grads")
    if not in_place:
        lines.append(f"    results: List[Tuple[{result}]] = []")
    parts = segments(stages)
    seen = 0
    for number, part in enumerate(parts):
        if is_measured(stages[part.start]):
            lines += [
                f"    if len(measured) > {seen}:",
                f"        totals.append(measured[{seen}])",
                "    else:",
                f"        totals.append(total_{part.start}(gs))",
            ]
            seen += 1
        final = number == len(parts) - 1
        loop = _pass(stages, number, part, final, in_place)
        if final and chunks:
            loop = [*before_leaves(chunks), loop[0], *for_leaf(stages, chunks), *loop[1:]]
        lines += loop
    if not in_place:
        lines.append("    return results")
    return "\n".join(lines)


def _pass(
    stages: Sequence[Stage], number: int, part: range, final: bool, in_place: bool
) -> list[str]:
    """The loop over leaves of one segment."""
    here = _stateful(stages, part)
    inputs = "".join(f", s{i}[k]" for i in here)
    carried = ["r"] if _carries_raw(stages) else []
    outputs = ", ".join(["p", "g", *carried, *(f"n{i}" for i in here)])
    lines: list[str] = []
    if not final:
        lines += [f"    next_{one}s: List[Tensor] = []" for one in ["p", "g", *carried]]
        lines += [f"    new_{i}: List[State_{i}] = []" for i in here]
    raw = "rs[k]" if carried else "grads[k]"
    call = f"segment_{number}(ps[k], gs[k], {raw}, coefficients[which[k]], totals{inputs})"
    lines += [
        "    for k in range(len(ps)):",
        f"        {outputs} = {call}",
    ]
    if not final:
        lines += [f"        next_{one}s.append({one})" for one in ["p", "g", *carried]]
        lines += [f"        new_{i}.append(n{i})" for i in here]
        return [*lines, *(f"    {one}s = next_{one}s" for one in ["p", "g", *carried])]
    made = {i: (f"n{i}" if i in here else f"new_{i}[k]") for i in _stateful(stages)}
    if in_place:
        lines += ["        olds = [params[k]]", "        news = [p]"]
        for i, new in made.items():
            lines += [f"        olds.extend(tensors_{i}(s{i}[k]))"]
            lines += [f"        news.extend(tensors_{i}({new}))"]
        lines.append("        write(olds, news)")
    else:
        lines.append(f"        results.append(({', '.join(['p', *made.values()])},))")
    return lines


def _tensors(stages: Sequence[Stage], i: int, list_fields: Sequence[str]) -> str:
    """All tensors of one stage's state."""
    lines = [f"def tensors_{i}(state: State_{i}) -> List[Tensor]:", "    found: List[Tensor] = []"]
    for field in stages[i].state._fields:
        add = "extend" if field in list_fields else "append"
        lines.append(f"    found.{add}(state.{field})")
    return "\n".join([*lines, "    return found"])


# A rule may hand back what it was given, in another place: not to be read after it was written.
_WRITE = """
def apart(new: Tensor, own: Tensor, olds: List[Tensor]) -> Tensor:
    if new.is_cpu or new.is_cuda:
        for old in olds:
            if old.device == new.device and new.is_set_to(old) and old is not own:
                return new.clone()
    return new


def write(olds: List[Tensor], news: List[Tensor]) -> None:
    if len(olds) != len(news):
        raise ValueError("a rule returned another number of tensors than its state has")
    values: List[Tensor] = []
    for j in range(len(olds)):
        if olds[j].shape != news[j].shape or olds[j].dtype != news[j].dtype:
            raise ValueError(
                "a rule must keep shape and dtype: it made of " + str(olds[j].shape) + ", dtype "
                + str(olds[j].dtype) + ", " + str(news[j].shape) + ", dtype " + str(news[j].dtype)
            )
        values.append(apart(news[j], olds[j], olds))
    for j in range(len(olds)):
        olds[j].copy_(values[j])
""".strip("\n")


def source(
    stages: Sequence[Stage],
    list_fields: Sequence[Sequence[str]],
    chunks: Sequence[ProgramChunk] = (),
) -> str:
    """The functions that run a chain over lists of leaves: ``run`` and ``run_``.

    Args:
        stages: of the chain.
        list_fields: the fields of each stage's state that are lists.
        chunks: what ``run_`` steps flat leaves by.
    """
    parts = [_WRITE, *(_tensors(stages, i, list_fields[i]) for i in _stateful(stages))]
    if chunks:
        parts += [OVERLAP, *(chunk_source(chunk, n) for n, chunk in enumerate(chunks))]
    parts += [_measure(i) for i, stage in enumerate(stages) if is_measured(stage)]
    parts += [_segment(stages, n, part) for n, part in enumerate(segments(stages))]
    parts += [_run(stages, in_place=False), _run(stages, in_place=True, chunks=chunks)]
    return "\n\n\n".join(parts) + "\n"


def _coefficients(stage: Stage, i: int) -> str:
    if stage.coefficients is same_coefficients:
        return f"self.h{i}[group]"
    return f"coefficients_{i}(float(step), self.h{i}[group])"


_PROGRAM = Template("""
def as_real(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor


class Program(torch.nn.Module):
    params: List[Tensor]
    steps: List[Tensor]
    groups: List[int]
    index: Dict[Tensor, int]
$attributes

    def __init__(self, params: List[Tensor], steps: List[Tensor], groups: List[int]$arguments):
        super().__init__()
        self.params = params
        self.steps = steps
        self.groups = groups
        self.index = {param: k for k, param in enumerate(params)}
$assignments

    @torch.jit.export
    def set_hypers(self$hyper_arguments) -> None:
$set_hypers

    @torch.jit.export
    def step(self, gradients: List[Optional[Tensor]]) -> None:
        if len(gradients) != len(self.params):
            raise ValueError(
                "step takes one gradient (or None) per parameter: got "
                + str(len(gradients)) + " gradients for " + str(len(self.params)) + " parameters"
            )
        indices: List[int] = []
        grads: List[Tensor] = []
        params = self.params
        for k, gradient in enumerate(gradients):
            if gradient is not None:
                if not gradient.is_same_size(params[k]):
                    raise ValueError(
                        "gradient " + str(k) + " has shape " + str(gradient.shape)
                        + ", its parameter " + str(params[k].shape)
                    )
                indices.append(k)
                grads.append(as_real(gradient))
        self._advance(indices, grads)

    @torch.jit.export
    def step_param(self, param: Tensor, gradient: Optional[Tensor]) -> None:
$step_param

    def _advance(self, indices: List[int], grads: List[Tensor]) -> None:
        with torch.no_grad():
            coefficients: List[$coefficient_tuple] = []
            which: List[int] = []
            last_step = -1
            last_group = -1
            steps = [self.steps[k] for k in indices]
            groups = self.groups
            for j, k in enumerate(indices):
                step = int(steps[j].item()) + 1
                group = groups[k]
                if step != last_step or group != last_group:
                    coefficients.append(($coefficients,))
                    last_step = step
                    last_group = group
                which.append(len(coefficients) - 1)
            measured: List[Tensor] = []
            params = [as_real(self.params[k]) for k in indices]
            run_(params, grads, coefficients, which, measured$state_arguments)
            for one in steps:  # TorchScript takes a call of _foreach_add_ for one without effect
                one.add_(1)
""")

_STEP_PARAM = """
        if gradient is not None:
            self._advance([self.index[param]], [as_real(gradient)])
"""

_REFUSE_STEP_PARAM = """
        raise ValueError("this chain needs all gradients at once: call step(gradients)")
"""


def program_source(stages: Sequence[Stage]) -> str:
    """A module that holds params, state and hyper-parameters, and needs no Python to step."""
    states = _stateful(stages)
    every = range(len(stages))
    hypers = [f"h{i}: List[Hyper_{i}]" for i in every]
    typed = [f"s{i}: List[State_{i}]" for i in states] + hypers
    names = [f"s{i}" for i in states] + [f"h{i}" for i in every]
    whole = any(is_measured(stage) for stage in stages)
    return _PROGRAM.substitute(
        attributes="\n".join(f"    {one}" for one in typed),
        arguments="".join(f", {one}" for one in typed),
        assignments="\n".join(f"        self.{name} = {name}" for name in names),
        hyper_arguments="".join(f", {one}" for one in hypers),
        set_hypers="\n".join(f"        self.h{i} = h{i}" for i in every),
        step_param=(_REFUSE_STEP_PARAM if whole else _STEP_PARAM).strip("\n"),
        coefficient_tuple=coefficient_tuple(stages),
        coefficients=", ".join(_coefficients(stage, i) for i, stage in enumerate(stages)),
        state_arguments="".join(f", [self.s{i}[k] for k in indices]" for i in states),
    )
