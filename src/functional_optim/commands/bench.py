"""``functional-optim bench``: the command."""

import subprocess
import sys
from pathlib import Path

import click

import functional_optim

ARGUMENTS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command("bench", context_settings=ARGUMENTS, options_metavar="[BENCHMARK OPTIONS]...")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="")
def bench(arguments: tuple[str, ...]) -> None:
    """Run the benchmarks of a checkout.

    This command needs a checkout of the repository: the installed package does not contain the
    benchmarks. It looks for them in the current folder, in the folders above it, and beside an
    editable install. All options go to `python -m benchmarks`.

    \b
    Example:
      cd functional-optim
      pip install -e ".[bench]"
      functional-optim bench --quick
      functional-optim bench -- --help    the options of the benchmarks

    \b
    Exit codes:
      0  the benchmarks ran
      1  a part of them failed
      2  wrong options, or no checkout
    """
    root = find_checkout()
    if root is None:
        raise click.UsageError(
            "bench needs a checkout of the functional-optim repository: the folder benchmarks/ is "
            f"not in {Path.cwd()} nor above it, and the installed package does not contain it. "
            "Clone the repository, change to its folder, and run the command there."
        )
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments], cwd=root, check=False
    )
    sys.exit(finished.returncode)


def find_checkout() -> Path | None:
    """Return the root of the checkout that has the benchmarks, or None."""
    here, package = Path.cwd(), Path(functional_optim.__file__).resolve()
    for folder in (here, *here.parents, *package.parents):
        if (folder / "benchmarks" / "__main__.py").is_file() and _is_ours(folder):
            return folder
    return None


def _is_ours(folder: Path) -> bool:
    project = folder / "pyproject.toml"
    return project.is_file() and 'name = "functional-optim"' in project.read_text("utf-8")
