"""Tests that an error names a user's file that hides one of our packages, with the solution."""

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from functional_optim.command_line import cli
from functional_optim.core.packages import FOLDER, require_package


def run_beside(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder with files of the user, which come first on the search path."""
    script = folder / "train.py"
    script.write_text(program)
    return subprocess.run(
        [sys.executable, str(script)],
        env={"PYTHONPATH": str(FOLDER)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def test_a_file_that_hides_the_planner_is_named_where_hooks_are_imported(tmp_path: Path) -> None:
    (tmp_path / "sharding.py").write_text("open('ran', 'w').close()\n")
    done = run_beside(tmp_path, "import hooks\n")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: {tmp_path / 'sharding.py'} hides the package 'sharding'")
    assert "Rename it" in last and "python -P" in last
    assert not (tmp_path / "ran").exists()


def test_a_file_that_hides_the_hooks_does_not_hinder_the_core(tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text("mine = 1\n")
    done = run_beside(tmp_path, "import functional_optim, sharding, hooks\nassert hooks.mine\n")
    assert done.returncode == 0, done.stderr


def test_modules_and_folders_that_hide_a_package_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_package("hooks")
    require_package("sharding")
    mine = ModuleType("hooks")
    mine.__file__ = str(tmp_path / "hooks.py")
    folder = ModuleType("hooks")
    folder.__spec__ = ModuleSpec("hooks", None, is_package=True)
    folder.__spec__.submodule_search_locations = [str(tmp_path / "hooks")]
    for module in (mine, folder):
        monkeypatch.setitem(sys.modules, "hooks", module)
        with pytest.raises(ImportError, match="hides the package 'hooks'") as raised:
            require_package("hooks")
        assert raised.value.path == str(tmp_path / "hooks") + (".py" if module is mine else "")


def test_the_command_line_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ModuleType("hooks")
    mine.__file__ = str(tmp_path / "hooks.py")
    monkeypatch.setitem(sys.modules, "hooks", mine)
    result = CliRunner().invoke(cli, ["demo"])
    assert result.exit_code == 2
    assert f"{tmp_path / 'hooks.py'} hides the package" in result.output.replace("\n", "")
