"""C++ text of a loop: the step of a chain for many leaves.

One function steps all leaves with the same scalars, by pointers to their tensors. Everything that
changes with the step, such as scalars and threads, is an argument, so it is compiled once.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.exact.formulas import (
    COMPARING,
    FORMULAS,
    LIBRARY,
    At,
    operation,
)
from functional_optim.kernels.exact.frame import Frame
from functional_optim.kernels.exact.phases import (
    REDUCTIONS,
    Variant,
    find_phases,
    is_bitcast,
)
from functional_optim.kernels.exact.values import (
    Value,
    loaded,
    memory_type,
    register_type,
    rounded,
    to_store,
)
from functional_optim.kernels.graph import Trace
from functional_optim.kernels.validate import Validated

WIDTH = 16
"""Number of partial maxima of a reduction, which the compiler keeps in vectors."""


class LoopText:
    """C++ text of the loop of one graph, for tensors of certain dtypes."""

    def __init__(
        self, trace: Trace, validated: Validated, block_size: int, variant: Variant
    ) -> None:
        self._trace, self._values = trace, validated.values
        self._block_size, self._variant = block_size, variant
        self._phases = find_phases(trace, validated, block_size, variant)
        self._order = tuple(trace.graph.nodes)
        self._homes = {node: f"a{k}" for k, node in enumerate(trace.chunk)}
        self._stored: dict[fx.Node, str] = {}
        self._scratch: dict[str, torch.dtype] = {}
        self._late: list[tuple[fx.Node, int]] = []
        called = (*self._phases.calls, *self._phases.single_calls)
        self.calls = tuple(dict.fromkeys(LIBRARY[operation(n)] for n in called))
        """The names of the library functions that the loop calls."""
        self.precision = _precision([self._values[n].dtype for n in called])
        """The dtype of these functions."""
        self._place()

    def _place(self) -> None:
        """Choose where each value is stored: in a leaf's tensor, in scratch, or in a register."""
        phases, reads = self._phases, self._reads()
        reduced = {phases.source(node.all_input_nodes[0]) for node in phases.reductions}
        for node, place in self._trace.results:
            made, old = phases.source(node), self._trace.chunk[place]
            early = (
                made in phases.phase
                and made not in phases.calls
                and made not in self._stored
                and made not in reduced
                and phases.layout[made] == "element"
                and phases.phase[made] < phases.last
                and max(reads.get(old, [0])) <= phases.phase[made]
            )
            if early:
                self._homes[made] = self._stored[made] = f"a{place}"
            else:
                self._late.append((made, place))
        for node, phase in phases.phase.items():
            if phases.layout[node] != "element" or node in self._homes:
                continue
            crosses = any(one > phase for one in reads.get(node, []))
            given = any(node is phases.source(end.all_input_nodes[0]) for end in self._ends())
            if crosses or given or node in phases.calls:
                name = f"s{len(self._scratch)}"
                self._scratch[name] = self._values[node].dtype
                self._homes[node] = self._stored[node] = name

    def _ends(self) -> tuple[fx.Node, ...]:
        return (*self._phases.calls, *self._phases.reductions)

    def _reads(self) -> dict[fx.Node, list[int]]:
        """Return the loops that read each value. Results are also read in the last loop."""
        found: dict[fx.Node, list[int]] = {}
        for node, phase in self._phases.phase.items():
            for one in node.all_input_nodes:
                found.setdefault(self._phases.source(one), []).append(phase)
        for node, _ in self._trace.results:
            found.setdefault(self._phases.source(node), []).append(self._phases.last)
        for call in reversed(self._phases.calls):  # the root of zero is its argument: see _read
            found[self._argument(call)] += found.get(call, [])
        return found

    def _argument(self, call: fx.Node) -> fx.Node:
        """Return the argument of a library call."""
        return self._phases.source(call.all_input_nodes[0])

    # ------------------------------------------------------------------------------ expressions

    def _value(self, argument: Any) -> Any:
        """Return an argument of an operation as an argument of a formula."""
        if isinstance(argument, (bool, int, float)):
            return Value("", None, argument)
        if not isinstance(argument, fx.Node):
            return argument
        known = self._values[argument]
        if argument in self._trace.scalar_args:
            return Value(named(argument), None, is_tensor=isinstance(known, Tensor))
        if not isinstance(known, Tensor):
            return self._value(known)
        node = self._phases.source(argument)
        if self._phases.layout[node] == "number":
            return Value(named(node), None, is_tensor=True)
        return Value(named(node), known.dtype)

    def _expression(self, node: fx.Node) -> str:
        """Return the expression of a node, in the type of its dtype."""
        result, name = self._values[node].dtype, operation(node)
        args = [self._value(one) for one in node.args]
        if is_bitcast(node):
            return self._bits(args[0], result)
        if node in self._phases.single_calls:
            given = At(result, result)(args[0])
            return f"single(library.{LIBRARY[name]}, {given}, library.mode)"
        formula = FORMULAS.get(name)
        if formula is None:
            raise UntraceableError(f"{name} has no formula that is torch's to the bit")
        keywords = {key: self._value(one) for key, one in node.kwargs.items()}
        compute = result
        if name in COMPARING:
            compute = _common([self._known(one) for one in node.args])
        try:
            text = formula(At(compute, result), *args, **keywords)
        except UntraceableError:
            raise
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise UntraceableError(f"{name} has no formula for these arguments: {error}") from error
        return rounded(text, result)

    def _known(self, argument: Any) -> Any:
        """Return the value of an argument in the example."""
        return self._values[argument] if isinstance(argument, fx.Node) else argument

    def _bits(self, value: Value, result: torch.dtype) -> str:
        assert value.dtype is not None
        if value.dtype.itemsize != result.itemsize:
            raise UntraceableError(f"the bits of {value.dtype} as {result} have no formula")
        inner = to_store(value.text, value.dtype)
        return loaded(f"bits<{memory_type(result)}>({inner})", result)

    # -------------------------------------------------------------------------------- statements

    def _declared(self, node: fx.Node) -> str:
        kind = register_type(self._values[node].dtype)
        return f"const {kind} {named(node)} = {self._expression(node)};"

    def _numbers(self) -> Iterator[str]:
        """Yield the lines that compute numbers once for all elements."""
        for i, node in enumerate(self._trace.scalar_args):
            yield f"const double {named(node)} = numbers[{i}];"
        for node in self._trace.graph.nodes:
            made = node.op != "placeholder" and self._phases.layout.get(node) == "number"
            if made and node not in self._phases.alias:
                yield self._declared(node)

    def _read(self, node: fx.Node) -> str:
        """Return the line that reads a value from memory."""
        dtype = self._values[node].dtype
        home = self._homes[node]
        text = loaded(f"{home}[i]", dtype) if home.startswith("a") else f"{home}[i]"
        if node in self._phases.calls and operation(node) == "sqrt":
            argument = named(self._argument(node))
            text = f"{argument} == 0 ? {argument} : {text}"
        return f"const {register_type(dtype)} {named(node)} = {text};"

    def _loop(self, phase: int) -> str:
        """Return a loop over a block."""
        phases = self._phases
        here = [
            node
            for node, at in phases.phase.items()
            if at == phase and phases.layout[node] == "element" and node not in phases.calls
        ]
        late = self._late if phase == phases.last else []
        wanted = {phases.source(one) for node in here for one in node.all_input_nodes}
        wanted |= {self._argument(call) for call in self._called_at(phase)}
        wanted |= {node for node, _ in late}
        for call in reversed(phases.calls):  # the root of zero is its argument: see _read
            if call in wanted:
                wanted.add(self._argument(call))
        elements = [n for n in self._order if n in wanted and n in self._homes and n not in here]
        lines = [self._read(n) for n in elements if phases.layout[n] == "element"]
        lines += [self._declared(node) for node in here]
        for node in here:
            if node in self._stored:
                lines.append(self._write(self._stored[node], node))
        lines += [self._zero_aside(call) for call in self._called_at(phase)]
        kept = [(n, place) for n, place in late if phases.layout[n] == "element"]
        lines += [self._write(f"a{place}", node) for node, place in kept]
        return _for("      ", lines) if lines else ""

    def _called_at(self, phase: int) -> list[fx.Node]:
        return [call for call in self._phases.calls if self._phases.phase[call] == phase]

    def _zero_aside(self, call: fx.Node) -> str:
        """Return the line that stores a call's argument; 1 for the root of zero, which is slow."""
        argument = named(self._argument(call))
        given = f"{argument} == 0 ? 1 : {argument}" if operation(call) == "sqrt" else argument
        return f"{self._homes[call]}[i] = {given};"

    def _write(self, home: str, node: fx.Node) -> str:
        dtype = self._values[node].dtype
        text = to_store(named(node), dtype) if home.startswith("a") else named(node)
        return f"{home}[i] = {text};"

    def _block(self) -> str:
        """Return the text for one block."""
        phases = self._phases
        text = "".join(self._per_block(k, node) for k, node in enumerate(self._trace.chunk))
        for phase in range(phases.last + 1):
            here = [node for node, at in phases.phase.items() if at == phase]
            for node in here:
                if phases.layout[node] == "block" and node not in phases.reductions:
                    text += f"    {self._declared(node)}\n"
            text += self._loop(phase)
            for call in self._called_at(phase):
                home, name = self._homes[call], LIBRARY[operation(call)]
                text += f"    library.{name}(len, {home}, {home}, library.mode);\n"
            text += "".join(self._reduced(node) for node in here if node in phases.reductions)
        for node, place in self._late:
            if phases.layout[node] == "block":
                value = to_store(named(node), self._values[node].dtype)
                text += f"    b{place}[group] = {value};\n"
        return text

    def _per_block(self, place: int, node: fx.Node) -> str:
        """Return the line that reads the value of this block; "" for a tensor per element."""
        if self._phases.layout[node] != "block":
            return ""
        dtype = self._values[node].dtype
        value = loaded(f"b{place}[group]", dtype)
        return f"    const {register_type(dtype)} {named(node)} = {value};\n"

    def _reduced(self, node: fx.Node) -> str:
        """Return the lines of a maximum or minimum over the block."""
        source = self._phases.source(node.all_input_nodes[0])
        dtype, home = self._values[node].dtype, self._homes[source]
        if self._block_size % WIDTH or home.startswith("a"):
            raise UntraceableError(f"{node.name} has no formula over {self._block_size} elements")
        kind, better = register_type(dtype), REDUCTIONS[operation(node)]
        name = named(node)
        rest = "for (int i = len; i < GRANULARITY; ++i)"
        worst = "0" if self._phases.padded else f"{home}[0]"
        return (
            f"    {rest} {home}[i] = {worst};\n"
            f"    {kind} m{name}[{WIDTH}];\n"
            f"    for (int j = 0; j < {WIDTH}; ++j) m{name}[j] = {home}[j];\n"
            f"    for (int i = {WIDTH}; i < GRANULARITY; i += {WIDTH})\n"
            f"      for (int j = 0; j < {WIDTH}; ++j)\n"
            f"        m{name}[j] = {better}<{kind}>(m{name}[j], {home}[i + j]);\n"
            f"    {kind} {name} = m{name}[0];\n"
            f"    for (int j = 1; j < {WIDTH}; ++j)\n"
            f"      {name} = {better}<{kind}>({name}, m{name}[j]);\n"
        )

    def text(self) -> str:
        """Return the whole text."""
        in_blocks = bool(self._ends()) or self._block_size > 1
        frame = Frame(
            self._block_size,
            in_blocks,
            self._variant.fused,
            self._is_opaque(),
            self.calls,
            self.precision,
            len(self._trace.chunk),
        )
        numbers = "".join(f"  {line}\n" for line in self._numbers())
        return frame.around(numbers, f"{self._arrays()}{self._block()}")

    def _is_opaque(self) -> bool:
        """Return True if a float is converted to an integer and back."""
        floats = {n for n, one in self._values.items() if _is_float(one)}
        wholes = {
            node
            for node in self._trace.graph.nodes
            if node in self._phases.layout and node not in floats
            if any(self._phases.source(one) in floats for one in node.all_input_nodes)
        }
        return any(one in wholes for node in floats for one in node.all_input_nodes)

    def _arrays(self) -> str:
        lines = []
        for k, node in enumerate(self._trace.chunk):
            kind = memory_type(self._values[node].dtype)
            const = "const " * (k == 1)
            if self._phases.layout[node] == "block":
                lines.append(f"    {const}{kind}* const b{k} = ({const}{kind}*)arrays[{k}];")
            else:
                lines.append(f"    {const}{kind}* const a{k} = ({const}{kind}*)arrays[{k}] + o;")
        for name, dtype in self._scratch.items():
            lines.append(f"    alignas(64) {register_type(dtype)} {name}[BLOCK];")
        return "".join(f"{line}\n" for line in lines)


def _precision(dtypes: list[torch.dtype]) -> torch.dtype:
    if len(set(dtypes)) > 1:
        raise UntraceableError("roots in two precisions have no common loop")
    return dtypes[0] if dtypes else torch.float32


def named(node: fx.Node) -> str:
    """Return a name for a value in the text that is not a keyword of C++."""
    return f"v_{node.name}"


def _common(operands: list[Any]) -> torch.dtype:
    """Return the dtype in which operands are compared."""
    found = torch.empty(1, dtype=torch.bool)
    for other in sorted(operands, key=lambda one: not isinstance(one, Tensor)):
        found = torch.empty(1, dtype=torch.result_type(found, other))
    return found.dtype


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _for(indent: str, lines: list[str]) -> str:
    body = "".join(f"{indent}{line}\n" for line in lines)
    return f'    _Pragma("GCC ivdep") for (long i = 0; i < len; ++i) {{\n{body}    }}\n'
