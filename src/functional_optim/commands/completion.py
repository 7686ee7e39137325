"""``functional-optim completion``: the command."""

import click
from click.shell_completion import get_completion_class

PROGRAM = "functional-optim"
VARIABLE = "_FUNCTIONAL_OPTIM_COMPLETE"
"""The environment variable by which the shell asks the program for completions."""
SHELLS = ("bash", "zsh", "fish")


@click.command("completion", short_help="Print a script for shell completion.")
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print a script that makes the shell complete commands and options.

    Load the script in each new shell from the shell's start-up file. bash must be version 4.4 or
    later.

    \b
    Examples:
      functional-optim completion bash >> ~/.bashrc
      functional-optim completion zsh >> ~/.zshrc
      functional-optim completion fish > ~/.config/fish/completions/functional-optim.fish

    \b
    Exit codes:
      0  the script was printed
      2  an unknown shell
    """
    found = get_completion_class(shell)
    assert found is not None
    root = click.get_current_context().find_root().command
    # click would ask bash for its version first; a script can be printed where bash is not.
    script = found(root, {}, PROGRAM, VARIABLE)
    click.echo(script.source_template % script.source_vars())
