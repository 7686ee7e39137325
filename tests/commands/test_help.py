"""Tests that each command shows an example and its exit codes, and completes in a shell."""

import subprocess
from pathlib import Path

import pytest
from click import Context, Group

from functional_optim import algorithms
from functional_optim.__main__ import main
from functional_optim.command_line import cli
from tests.choices import case

from .support import failed, shown

COMMANDS = [
    *("bench", "check", "completion", "convert", "demo", "explain", "inspect", "list", "plan"),
]
PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"


def test_every_command_has_an_example_and_its_exit_codes() -> None:
    assert isinstance(cli, Group)
    assert cli.list_commands(Context(cli)) == COMMANDS
    whole = shown("--help")
    for name in COMMANDS:
        with case(name=name):
            text = shown(name, "--help")
            assert f"  functional-optim {name}" in text
            assert "Exit codes:\n" in text
            assert "    0  " in text
            assert "\n    2  " in text
            (line,) = [one for one in whole.splitlines() if one.startswith(f"  {name} ")]
            assert not line.endswith("...")


def test_every_command_and_option_is_on_its_page() -> None:
    page = PAGE.read_text("utf-8")
    for name in COMMANDS:
        command = cli.get_command(Context(cli), name)
        assert command is not None
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        for param in command.params:
            for option in param.opts:
                if option.startswith("--"):
                    with case(name=name, option=option):
                        assert f"`{option}" in section


def test_shells_are_told_how_to_complete(tmp_path: Path) -> None:
    for shell, word in (("bash", "complete -o nosort -F"), ("zsh", "compdef"), ("fish", "--no-")):
        with case(shell=shell):
            text = shown("completion", shell)
            assert f"_FUNCTIONAL_OPTIM_COMPLETE={shell}_complete" in text
            assert word in text
    assert "'csh' is not one of" in failed(2, "completion", "csh")
    script = tmp_path / "complete.bash"
    script.write_text(shown("completion", "bash"))
    subprocess.run(["bash", "-n", script], check=True, timeout=60)


def test_a_shell_that_asks_gets_completions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {
        "_FUNCTIONAL_OPTIM_COMPLETE": "bash_complete",
        "COMP_WORDS": "functional-optim explain ada",
        "COMP_CWORD": "2",
    }
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    found = [line.partition(",")[2] for line in capsys.readouterr().out.splitlines()]
    assert found == sorted(one for one in algorithms.__all__ if one.startswith("ada"))
    assert "adamw" in found
