"""The command line: a group that collects its commands from the packages installed.

A package adds a command by an entry point of the group ``functional_optim.commands``; so the
packages on top of this one have commands here, and this one need not import them.
"""

from importlib.metadata import EntryPoint, entry_points

import click

ENTRY_POINTS = "functional_optim.commands"


class Commands(click.Group):
    """A group whose commands are entry points, each loaded when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands."""
        return sorted(entry.name for entry in entry_points(group=ENTRY_POINTS))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name; None if there is none."""
        found = entry_points(group=ENTRY_POINTS, name=cmd_name)
        return next((load(entry) for entry in found), None)


def load(entry: EntryPoint) -> click.Command:
    """The command behind an entry point.

    Raises:
        click.UsageError: a module that it needs is not installed.
        TypeError: what the entry point names is no command.
    """
    try:
        command = entry.load()
    except ModuleNotFoundError as error:
        raise click.UsageError(
            f"the command {entry.name!r} needs {error.name}, which is not installed; "
            'run: pip install "functional-optim[cli]"'
        ) from error
    if not isinstance(command, click.Command):
        raise TypeError(
            f"the entry point {entry.name!r} of {ENTRY_POINTS!r} must name a click.Command, got "
            f"{command!r} from {entry.value!r}"
        )
    return command


@click.group(cls=Commands)
@click.version_option(package_name="functional-optim")
def cli() -> None:
    """Optimizers as one pure function on one tensor, and many ways to run it."""
