"""Progress of training: a bar on a terminal, otherwise plain lines."""

from collections.abc import Mapping
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress:
    """Progress of one training loop, on stdout.

    Args:
        steps: number of steps.
        shown: False on all ranks but one.
    """

    def __init__(self, steps: int, *, shown: bool) -> None:
        console = Console()
        self._steps = steps
        self._lines = shown and not console.is_terminal
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not shown or not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=steps)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self) -> None:
        self._bar.advance(self._task)

    def note(
        self, step: int, losses_by_name: Mapping[str, float], what: str = "validation loss"
    ) -> None:
        """Show a loss of each run, by its name, after ``step`` steps."""
        each = ", ".join(f"{name} {loss:.3f}".strip() for name, loss in losses_by_name.items())
        losses = f"{what} {each}"
        self._bar.update(self._task, description=losses)
        if self._lines:
            print(f"step {step:>4} of {self._steps}: {losses}", flush=True)  # noqa: T201  the command's own output
