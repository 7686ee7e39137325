"""``functional-optim`` and ``python -m functional_optim``: start the command line."""

import sys


def main() -> None:
    """Run the command line, or print which package it needs."""
    try:
        from functional_optim.command_line import cli  # noqa: PLC0415  may be missing
    except ModuleNotFoundError as error:
        print(  # noqa: T201  click is missing
            f"functional-optim: the command line needs {error.name}, which is not installed; "
            'run: pip install ".[cli]" in a clone',
            file=sys.stderr,
        )
        sys.exit(2)
    cli(prog_name="functional-optim")


if __name__ == "__main__":
    main()
