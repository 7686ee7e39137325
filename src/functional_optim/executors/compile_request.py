"""What is asked of the process that compiles, and where it puts the answer."""

import hashlib
import json
import math
import platform
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

WIDTH = 16
"""Elements that a compiled loop takes at a time, as many as a vector register of float32 has. A
loop over a multiple of it needs no question after each such step whether it is the last one."""


def unit_of(grain: int) -> int:
    """The elements of a lane that a compiled step takes are a multiple of this many."""
    return math.lcm(WIDTH, grain)


class Request(NamedTuple):
    """One step to compile."""

    source: str
    """Text of a module ``Step`` (see :func:`~.compile_source.compile_source`)."""
    inputs: tuple[tuple[str, int], ...]
    """For each lane tensor: its dtype, and how many elements of the lane stand for one of its."""
    uniform: tuple[str, int]
    """Dtype and number of the uniform values."""
    device: str
    """The kind of device."""
    folder: str
    """Where compiled steps are kept."""
    grain: int
    """The granularity of the chain."""

    @property
    def unit(self) -> int:
        """The step is compiled for lanes of a multiple of so many elements."""
        return unit_of(self.grain)

    @property
    def in_rows(self) -> bool:
        """Whether it takes a lane as rows of a unit.

        Blocks are rows then: a loop over all elements that has to look up the block of each could
        not take several at a time.
        """
        return self.grain > 1

    @property
    def key(self) -> str:
        """A name for the result: equal for equal requests on equal machines."""
        text = json.dumps([self.source, self.inputs, self.grain, self.uniform, self.device])
        return hashlib.sha256((text + environment(self.device)).encode()).hexdigest()[:40]

    def to_json(self) -> str:
        """One line of text."""
        return json.dumps(self)

    @classmethod
    def from_json(cls, line: str) -> "Request":
        """The request in a line of text."""
        source, inputs, uniform, device, folder, grain = json.loads(line)
        return cls(source, tuple((d, e) for d, e in inputs), tuple(uniform), device, folder, grain)


def entry_files(folder: Path, key: str, device: str) -> tuple[Path, Path]:
    """The files of a compiled step: what is loaded, and the facts by which it is checked."""
    suffix = ".so" if device == "cpu" else ".pt2"
    return folder / f"{key}{suffix}", folder / f"{key}.json"


_COMPILING = ("compile_request.py", "compile_worker.py", "lowering.py")
"""What of this package decides what a request is compiled to."""


@lru_cache(maxsize=4)
def environment(device: str) -> str:
    """Everything beside the request that a compiled step depends on."""
    facts = [
        torch.__version__,
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
        *(Path(__file__).with_name(name).read_text() for name in _COMPILING),
        _processor(),
    ]
    if device == "cuda":
        facts += [str(torch.version.cuda), str(torch.cuda.get_device_capability())]
    return "\n".join(facts)


def _processor() -> str:
    """What the processor can do: libraries are compiled for the machine at hand."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
