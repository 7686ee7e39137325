"""Test that the commands of docs/command-line.md run in order, and print the text of the page."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.choices import case

from .support import run

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
ELSEWHERE = ("bench", "demo", "completion")
"""Commands with separate tests, since they need a checkout, much time, or a shell."""


def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(PAGE.read_text("utf-8"))
    (module, training) = [text for language, text in blocks if language == "python"]
    (tmp_path / "my_optimizer.py").write_text(module)
    exec(module + training, {})
    printed, compared = "", 0
    for language, text in blocks:
        if language == "text":
            compared += 1
            assert printed == text
        if language != "sh":
            continue
        for line in text.splitlines():
            command, _, note = line.partition("  # ")
            program, name, *arguments = shlex.split(command)
            if program == "functional-optim" and name not in ELSEWHERE:
                with case(line=line):
                    result = run(name, *arguments)
                    assert result.exit_code == int(note.removeprefix("exit code ") or 0), (
                        result.output
                    )
                printed = result.stdout
    assert compared == 3
    sys.modules.pop("my_optimizer", None)
