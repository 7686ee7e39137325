"""Runs of ``functional-optim plan`` in this process, and files for it to read."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from functional_optim.command_line import cli
from tests.choices import case


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["plan", *map(str, arguments)])


def shown(*arguments: object) -> str:
    """Return the output of the command, after it succeeds."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def refused(message: str, *arguments: object) -> str:
    """Return the output of the command, in one line, after it fails with this message."""
    result = run(*arguments)
    said = " ".join(result.output.split())
    with case(arguments=arguments):
        assert result.exit_code == 2
        assert message in said
    return said


def shapes(folder: Path, content: Any) -> Path:
    path = folder / "shapes.json"
    path.write_text(json.dumps(content))
    return path


def safetensors(folder: Path, header: Any, *, length: int | None = None) -> Path:
    """Write a safetensors file with a header and no tensors, since only the header is read."""
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    length = len(text) if length is None else length
    path.write_bytes(length.to_bytes(8, "little") + text)
    return path
