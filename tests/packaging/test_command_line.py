"""Tests of the console script, with and without its dependencies."""

import json
import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from functional_optim.__main__ import main
from functional_optim.command_line import ENTRY_POINTS, cli, load


def test_the_console_script_is_registered() -> None:
    (script,) = entry_points(group="console_scripts", name="functional-optim")
    assert script.load() is main


def test_help_lists_the_commands() -> None:
    result = CliRunner().invoke(cli, ["--help"])
    assert result.exit_code == 0
    assert "demo" in result.output
    assert "Train a small model in three ways, and compare." in result.output


def test_an_unknown_command_is_refused() -> None:
    result = CliRunner().invoke(cli, ["nonsense"])
    assert result.exit_code == 2
    assert "No such command 'nonsense'" in result.output


def test_running_the_package_prints_the_version() -> None:
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-m", "functional_optim", "--version"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == f"functional-optim, version {version('functional-optim')}\n"


def test_planning_by_files_brings_no_modules_of_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "shapes.json").write_text("[[4]]")
    header = json.dumps({"w": {"dtype": "F32", "shape": [4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    for name in ("matplotlib", "rich", "planted"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w').close()\n")
    program = (
        "import sys\n"
        "from functional_optim.command_line import cli\n"
        "for source in sys.argv[1:]:\n"
        "    arguments = f'plan --model {source} --world-size 2 --plot {source}.png'\n"
        "    cli.main(arguments.split(), standalone_mode=False)\n"
    )
    command = [sys.executable, "-P", "-c", program, "shapes.json", "model.safetensors"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=900, stdout=subprocess.DEVNULL)
    assert not (tmp_path / "ran").exists()
    assert (tmp_path / "shapes.json.png").exists()
    assert (tmp_path / "model.safetensors.png").exists()


def test_without_click_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "click", None)
    monkeypatch.delitem(sys.modules, "functional_optim.command_line")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "needs click" in said
    assert 'pip install ".[cli]" in a clone' in said


def test_without_rich_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    for name in [name for name in sys.modules if name.startswith("hooks.demo")]:
        monkeypatch.delitem(sys.modules, name)
    result = CliRunner().invoke(cli, ["demo"])
    assert result.exit_code == 2
    assert "'demo' needs rich" in result.output
    assert 'pip install ".[cli]" in a clone' in result.output


def test_an_entry_point_that_is_no_command_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"'bad' .* must name a click.Command, got .*sqrt"):
        load(EntryPoint("bad", "math:sqrt", ENTRY_POINTS))
    assert isinstance(cli, click.Group)
