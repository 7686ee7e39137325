"""Installation of packages and README in new environments: ``make test-install``.

``python -m tests.packaging.install wheel types`` runs some of the parts; without names, all parts
run. Each environment is a temporary folder. All packages, including torch, come from the package
index of pip, which takes minutes.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONSUMER = Path(__file__).parent / "consumer"
PINS = ROOT / "constraints.txt"

SMOKE = """
import importlib.metadata
import warnings
import torch

warnings.simplefilter("error")  # torch warns of its own where numpy is not installed
import functional_optim, hooks, sharding
from functional_optim.native import LOOPS

print(functional_optim.__file__, importlib.metadata.version("functional-optim"))
assert "site-packages" in functional_optim.__file__
params = {str(i): torch.ones(1000) for i in range(100)}
optimizer = functional_optim.adamw(lr=0.1)
bound = optimizer.bind(params)
bound.step({name: torch.ones(1000) for name in params})
print(bound.explain().splitlines()[0])
assert LOOPS.wait(600), "the loops in C++ were not compiled"
print(sharding.plan(params, 2).table())
"""
"""Program that checks an installation, including the compilation of the C++ sources."""


def run(arguments: list[str | Path], folder: Path, **environment: str) -> str:
    """Run a program; print its output if it fails.

    Returns:
        Standard output.
    """
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, arguments)),
        cwd=folder,
        env={**given, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n")
        raise SystemExit(f"{' '.join(map(str, arguments))} exited with {done.returncode}")
    return done.stdout


class Environment:
    """A new virtual environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        run([sys.executable, "-m", "venv", folder / "venv"], folder)
        self.bin = folder / "venv" / "bin"

    def pip(self, *arguments: str | Path) -> None:
        run([self.bin / "python", "-m", "pip", "install", "--quiet", *arguments], self.folder)

    def python(self, *arguments: str | Path) -> str:
        """Run Python of this environment in an empty folder."""
        work = Path(tempfile.mkdtemp(dir=self.folder))
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        cache = str(self.folder / "cache")
        programs = [self.bin / "python", *arguments]
        return run(programs, work, PATH=path, FUNCTIONAL_OPTIM_CACHE=cache)


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Print the duration of the block. Nothing depends on it."""
    start = time.monotonic()
    yield
    print(f"   {what}: {time.monotonic() - start:.0f} s", flush=True)


def source_copy(folder: Path) -> Path:
    """Copy the files that git does not ignore, so that nothing is built from leftovers."""
    names = run(["git", "ls-files", "-co", "--exclude-standard"], ROOT).splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def build(environment: Environment, source: Path) -> tuple[Path, Path]:
    """Build a wheel and a source distribution.

    Returns:
        The wheel, and the source distribution.
    """
    environment.pip("setuptools>=77")
    program = "from setuptools import build_meta as b; b.build_wheel('dist'); b.build_sdist('dist')"
    run([environment.bin / "python", "-c", program], source)
    (wheel,), (sdist,) = source.glob("dist/*.whl"), source.glob("dist/*.tar.gz")
    return wheel, sdist


def wheel(environment: Environment, source: Path) -> None:
    """The wheel and the source distribution, installed with torch and optree alone."""
    built = build(environment, source)
    with timed("pip install torch"):
        environment.pip(_torch())
    for file, options in zip(built, ((), ("--force-reinstall", "--no-deps")), strict=True):
        with timed(f"pip install {file.name}"):
            environment.pip("-c", PINS, *options, file)
        with timed("smoke test"):
            environment.python("-c", SMOKE)


def types(environment: Environment, source: Path) -> None:
    """A small project passes mypy and pyright in their strict modes, by the installed wheel."""
    built, _ = build(environment, source)
    with timed("pip install torch, the wheel, mypy and pyright"):
        environment.pip(_torch())
        environment.pip("-c", PINS, built, "mypy", "pyright")
    project = environment.folder / "consumer"
    shutil.copytree(CONSUMER, project)
    python = environment.bin / "python"
    with timed("the project runs"):
        run([python, "train.py"], project)
    with timed("mypy --strict"):
        run([python, "-m", "mypy", "--strict", "train.py"], project)
    with timed("pyright"):
        run([python, "-m", "pyright", "--pythonpath", python], project)


def readme(environment: Environment, source: Path) -> None:
    """The README's own commands to install, and each of its blocks."""
    text = (source / "README.md").read_text(encoding="utf-8")
    (shell,) = re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    path = f"{environment.bin}{os.pathsep}{os.environ['PATH']}"
    for line in shell.splitlines():
        command = line.partition("#")[0].strip()
        if command.startswith("pip install "):
            with timed(command):
                run(["sh", "-c", command], source, PATH=path)
    *blocks, program = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    script, train = environment.folder / "blocks.py", environment.folder / "train.py"
    script.write_text("\n".join(blocks))
    train.write_text(program)
    with timed("blocks in sequence"):
        environment.python(script)
    with timed("torchrun --nproc-per-node 2 train.py"):
        environment.python("-m", "torch.distributed.run", "--nproc-per-node", "2", train)
    with timed("functional-optim demo"):
        environment.python(environment.bin / "functional-optim", "demo")


def _torch() -> str:
    (found,) = re.findall(r"^torch==.+$", PINS.read_text(), flags=re.MULTILINE)
    return str(found)


PARTS = {"wheel": wheel, "types": types, "readme": readme}


def main(names: list[str]) -> None:
    """Run the parts named, or all."""
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise SystemExit(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    for name in names or PARTS:
        print(f"== {name}: {PARTS[name].__doc__}", flush=True)
        with tempfile.TemporaryDirectory(prefix="functional-optim-") as folder:
            source = source_copy(Path(folder) / "source")
            with timed(f"{name}, in all"):
                PARTS[name](Environment(Path(folder)), source)


if __name__ == "__main__":
    main(sys.argv[1:])
