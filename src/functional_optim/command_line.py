"""The command line: a group whose commands come from the installed packages.

A package adds a command by an entry point of the group ``functional_optim.commands``. So packages
that depend on this package can add commands, and this package does not import them.
"""

from importlib.metadata import EntryPoint, entry_points

import click

from functional_optim.core.packages import require_package

ENTRY_POINTS = "functional_optim.commands"


class Commands(click.Group):
    """Group whose commands are entry points. A command is loaded when it is first used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted(entry.name for entry in entry_points(group=ENTRY_POINTS))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command with a name, or None."""
        found = entry_points(group=ENTRY_POINTS, name=cmd_name)
        return next((load(entry) for entry in found), None)


def load(entry: EntryPoint) -> click.Command:
    """Return the command of an entry point.

    If a module that the command needs is missing, or a file of the user hides it, return a command
    that
    reports this. So all other commands and ``--help`` still work.

    Raises:
        TypeError: the entry point names an object that is no command.
    """
    try:
        require_package(entry.module.partition(".")[0])
    except ImportError as error:
        return _reporting(entry.name, "(a file of yours hides it)", f"cannot run: {error}", error)
    try:
        command = entry.load()
    except ModuleNotFoundError as error:
        needed = f"needs {error.name}, which is not installed"
        text = f'{needed}; run: pip install ".[cli]" in a clone'
        return _reporting(entry.name, f"({needed})", text, error)
    if not isinstance(command, click.Command):
        raise TypeError(
            f"the entry point {entry.name!r} of {ENTRY_POINTS!r} must name a click.Command, got "
            f"{command!r} from {entry.value!r}"
        )
    return command


def _reporting(name: str, short_help: str, text: str, error: ImportError) -> click.Command:
    """Return a command that reports why it cannot run, for any arguments."""
    context = {"ignore_unknown_options": True, "help_option_names": []}

    @click.command(name, context_settings=context, short_help=short_help)
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def report(arguments: tuple[str, ...]) -> None:
        raise click.UsageError(f"the command {name!r} {text}") from error

    return report


@click.group(cls=Commands)
@click.version_option(package_name="functional-optim")
def cli() -> None:
    """Composable optimizers for PyTorch, from the command line.

    \b
    Examples:
      functional-optim list                             all algorithms, with their state
      functional-optim check my_optimizer:make          property-test your own optimizer
      functional-optim inspect checkpoint.pt            what a checkpoint contains
      functional-optim plan --model shapes.json --world-size 8

    \b
    Exit codes of all commands:
      0  success
      1  the command ran, and the answer is no: a law is broken, results differ, a file is damaged
      2  wrong arguments, or something that the command needs is missing

    `functional-optim COMMAND --help` explains each command with an example.
    """
