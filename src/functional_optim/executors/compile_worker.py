"""The process that compiles: reads requests, writes one shared library for each.

It runs apart, so that a compiler that fails, hangs or crashes takes nothing with it, and the
training process never imports one. Each line of standard input is a request as JSON, each line of
standard output the answer to it; the end of the input is its end.
"""

import contextlib
import json
import os
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from functional_optim.executors.cache_entry import publish
from functional_optim.executors.compile_request import Request, entry_files


def main() -> None:
    """Serve until standard input ends."""
    if len(sys.argv) > 1:
        os.nice(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a compiler prints is no answer
    for line in sys.stdin:
        request = Request.from_json(line)
        error = None
        try:
            compile_request(request)
        except Exception as problem:  # noqa: BLE001  reported to the process that asked
            error = f"{type(problem).__name__}: {problem}"
        print(json.dumps({"error": error}), file=answers, flush=True)


def compile_request(request: Request) -> None:
    """Compile one request, and put the result in its place in one move."""
    from torch._inductor import aoti_compile_and_package, config  # noqa: PLC0415  slow to import

    module = load_source(request.source)
    arguments, shapes = _examples(request)
    target, facts = entry_files(Path(request.folder), request.key, request.device)
    target.parent.mkdir(parents=True, exist_ok=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(module, arguments, dynamic_shapes=(*shapes, None))
        with (
            tempfile.TemporaryDirectory(
                prefix=f"{request.key}-", dir=target.parent, ignore_cleanup_errors=True
            ) as folder,
            config.patch({"cpp.dynamic_threads": True}),
            contextlib.redirect_stdout(sys.stderr),
        ):
            package = Path(folder) / "step.pt2"
            aoti_compile_and_package(exported, package_path=str(package))
            made = _library_in(package, Path(folder)) if request.device == "cpu" else package
            publish(made, target, facts)


def load_source(source: str) -> torch.nn.Module:
    """The module in a source text."""
    scope: dict[str, Any] = {}
    exec(compile(source, "<step>", "exec"), scope)  # noqa: S102  our own text
    made: torch.nn.Module = scope["Step"]()
    return made


def _examples(request: Request) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
    """Arguments to export with, and their dynamic sizes."""
    groups = torch.export.Dim("groups", min=1)
    tensors: list[torch.Tensor] = []
    shapes: list[dict[int, Any]] = []
    for name, each in request.inputs:
        one = request.unit // each
        in_rows = request.in_rows and each == 1
        size = (64, one) if in_rows else (64 * one,)
        dtype = getattr(torch, name)
        tensors.append(torch.zeros(size, dtype=dtype, device=request.device))
        count: Any = groups if in_rows or one == 1 else one * groups
        shapes.append({0: count})
    name, values = request.uniform
    uniform = torch.ones(values, dtype=getattr(torch, name), device=request.device)
    return (*tensors, uniform), tuple(shapes)


def _library_in(package: Path, folder: Path) -> Path:
    """The shared library that a package holds."""
    with zipfile.ZipFile(package) as archive:
        [name] = [one for one in archive.namelist() if one.endswith(".so")]
        return Path(archive.extract(name, folder))


if __name__ == "__main__":
    main()
