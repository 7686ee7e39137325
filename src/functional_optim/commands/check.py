"""``functional-optim check``: the command."""

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import torch

from functional_optim.commands.arguments import checked_argument, complete_algorithm
from functional_optim.commands.objects import load_object, optimizer_factory, parse_options

if TYPE_CHECKING:
    from functional_optim.testing import Subject

DTYPES = ("float32", "float64", "bfloat16", "float16")
HOLDS, BROKEN, NOT_TRIED = "holds", "broken", "not tried"


class LawOutcome(NamedTuple):
    """The result of one law."""

    law: str
    result: str
    """"holds", "broken" or "not tried"."""
    seconds: float
    message: str | None
    """The error, with the smallest example; None for a law that holds."""
    example: str | None


@click.command(
    "check",
    short_help="Property-test an optimizer.",
    context_settings={"show_default": True},
)
@click.argument("factory", metavar="MODULE:FACTORY", shell_complete=complete_algorithm)
@click.option(
    "--oracle",
    metavar="MODULE:CLASS",
    help="A torch.optim class, or a function of (params, **options), that must give the same "
    "numbers.",
)
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Keyword argument for FACTORY and the oracle. Repeat a key to try several values.",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(DTYPES),
    help="Dtype of the parameters; may be repeated.  [default: float32, float64, bfloat16]",
)
@click.option(
    "--ulps",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Allowed distance from the oracle, in units in the last place. 0: the same bits.",
)
@click.option("--matrices", is_flag=True, help="The optimizer takes matrices only.")
@click.option("--not-scripted", is_flag=True, help="TorchScript cannot compile the optimizer.")
@click.option("--examples", type=click.IntRange(min=1), default=30, help="Runs drawn for each law.")
@click.option("--law", "laws", multiple=True, help="Check this law only; may be repeated.")
@click.option("--all", "every", is_flag=True, help="Check the slow laws, which compile, too.")
@click.option("--keep-going", is_flag=True, help="Go on after a law that is broken.")
@click.option("--explore", is_flag=True, help="Draw other runs each time, not the same ones.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
def check(
    *,
    factory: str,
    oracle: str | None,
    options: Sequence[str],
    dtypes: Sequence[str],
    ulps: float,
    matrices: bool,
    not_scripted: bool,
    examples: int,
    laws: Sequence[str],
    every: bool,
    keep_going: bool,
    explore: bool,
    as_json: bool,
) -> None:
    """Property-test an optimizer by every law, and print the smallest counterexample.

    MODULE:FACTORY names an Optimizer, a function that returns one, or a registered torch.optim
    class, in an installed package or in the current folder. A bare name is an algorithm of this
    package. The laws say, for example, that the inputs of `update` do not change, that a saved and
    loaded run goes on as before, and that a split into shards changes no number. Progress goes to
    standard error.

    \b
    Examples:
      functional-optim check adamw --oracle torch.optim:AdamW
      functional-optim check my_optimizer:make --option lr=0.1 --option lr=0.01
      functional-optim check my_optimizer:make --law pure --law "any moment" --json

    \b
    Exit codes:
      0  every law holds
      1  a law is broken, or could not be tried
      2  wrong arguments
    """
    _require_hypothesis()
    subject, is_composed = _subject(factory, oracle, options, dtypes, ulps, matrices, not_scripted)
    chosen = _chosen(laws, subject, is_composed=is_composed, every=every)
    found: list[LawOutcome] = []
    for number, name in enumerate(chosen, 1):
        click.echo(f"[{number}/{len(chosen)}] {name} ... ", nl=False, err=True)
        outcome = _outcome(name, subject, examples, explore=explore)
        click.echo(f"{outcome.result} ({outcome.seconds:.1f} s)", err=True)
        found.append(outcome)
        if outcome.result != HOLDS and not keep_going:
            break
    _print(factory, found, len(chosen), as_json=as_json)
    if any(one.result != HOLDS for one in found):
        click.get_current_context().exit(1)


def _require_hypothesis() -> None:
    try:
        import hypothesis  # noqa: F401, PLC0415  an extra
    except ModuleNotFoundError as error:
        raise click.UsageError(
            f"check needs {error.name}, which is not installed; "
            'run: pip install ".[cli]" in a clone'
        ) from error


def _subject(
    factory: str,
    oracle: str | None,
    options: Sequence[str],
    dtypes: Sequence[str],
    ulps: float,
    matrices: bool,
    not_scripted: bool,
) -> tuple["Subject", bool]:
    """Return the subject of the laws, and True if its leaves may have different stages."""
    from hypothesis import strategies as st  # noqa: PLC0415  an extra

    from functional_optim.testing import Subject  # noqa: PLC0415  needs hypothesis
    from functional_optim.testing.subject import plain_oracle  # noqa: PLC0415  needs hypothesis

    build = checked_argument("MODULE:FACTORY", factory, lambda: optimizer_factory(factory))
    values = checked_argument("--option", None, lambda: parse_options(options))
    firsts = {key: tried[0] for key, tried in values.items()}
    first = checked_argument("MODULE:FACTORY", factory, lambda: build(**firsts))
    other = None
    if oracle is not None:
        other = checked_argument("--oracle", oracle, lambda: _callable(load_object(oracle)))
    subject = Subject(
        build,
        plain_oracle(other),
        st.fixed_dictionaries({key: st.sampled_from(tried) for key, tried in values.items()}),
        tuple(getattr(torch, name) for name in dtypes or DTYPES[:3]),
        ulps,
        not not_scripted,
        matrices=matrices,
    )
    return subject, first.is_composed


def _callable(found: Any) -> Any:
    if not callable(found):
        raise ValueError(f"must be callable, it is {type(found).__name__}")
    return found


def _chosen(
    laws: Sequence[str], subject: "Subject", *, is_composed: bool, every: bool
) -> list[str]:
    """Return the names of the laws to check.

    Raises:
        click.BadParameter: there is no such law.
    """
    from functional_optim.testing import LAWS  # noqa: PLC0415  needs hypothesis

    for name in laws:
        if name not in LAWS:
            known = ", ".join(map(repr, LAWS))
            raise click.BadParameter(
                f"there is no law {name!r}; the laws are {known}", param_hint="--law"
            )
    if laws:
        return list(laws)
    usual = [name for name, law in LAWS.items() if every or not law.slow]
    usual = [name for name in usual if not (is_composed and LAWS[name].one_chain)]
    return [name for name in usual if LAWS[name].concerns(subject)]


def _outcome(name: str, subject: "Subject", examples: int, *, explore: bool) -> LawOutcome:
    from functional_optim.testing import (  # noqa: PLC0415  needs hypothesis
        LawBroken,
        LawNotTried,
        check_law,
    )

    begin = time.perf_counter()
    result, message, example = HOLDS, None, None
    try:
        check_law(name, subject, max_examples=examples, derandomize=not explore)
    except LawBroken as broken:
        result, message, example = BROKEN, str(broken), str(broken.example)
    except LawNotTried as refused:
        result, message, example = NOT_TRIED, str(refused), str(refused.example)
    return LawOutcome(name, result, time.perf_counter() - begin, message, example)


def _print(factory: str, found: Sequence[LawOutcome], count: int, *, as_json: bool) -> None:
    held = sum(one.result == HOLDS for one in found)
    if as_json:
        content = {
            "optimizer": factory,
            "holds": held == len(found) == count,
            "laws": [one._asdict() for one in found],
        }
        click.echo(json.dumps(content, indent=2))
        return
    for one in found:
        if one.message is not None:
            click.echo(f"\n{one.message}")
    if held == count:
        click.echo(f"{factory}: all {count} laws hold")
    else:
        left = count - len(found)
        rest = f", {left} not checked (--keep-going checks them)" if left else ""
        click.echo(f"\n{factory}: {held} of {count} laws hold{rest}")
