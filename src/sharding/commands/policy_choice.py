"""Names of policies as an option of commands."""

from collections.abc import Iterable
from typing import Any

import click

from sharding.policies import REMOVED, removed


class PolicyChoice(click.Choice[str]):
    """One of the names of some policies; a name that was removed is refused with its replacement.

    Args:
        names: of the policies.
    """

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(list(names))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name.

        Raises:
            click.BadParameter: there is no such policy.
        """
        if value in REMOVED:
            self.fail(removed(value), param, ctx)
        return super().convert(value, param, ctx)
