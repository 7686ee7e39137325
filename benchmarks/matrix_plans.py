"""Evenness of ``two_resource`` plans of real models: ``python -m benchmarks.matrix_plans``.

The plans depend on shapes only: there is no process group and no tensor. Muon steps the hidden
matrices, and AdamW steps embeddings, biases and norms.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import click

from functional_optim import Optimizer, adamw, muon
from sharding import MatrixBlocks, ParameterSpec, plan

RANKS = 64
MANY_PARAMETERS, MANY_RANKS = 10_000, 4_096

MUON, ADAMW = muon(), adamw()
Specs = list[ParameterSpec]


def rule(spec: ParameterSpec) -> Optimizer:
    """Return the optimizer of a parameter."""
    return MUON if spec.kind == "per_matrix" else ADAMW


def gpt2(layers: int, width: int, blocks: MatrixBlocks | None) -> Specs:
    """Return the parameters of GPT-2. ``blocks`` divide the fused projection of Q, K and V."""
    specs = [ParameterSpec("wte", (50_257, width)), ParameterSpec("wpe", (1_024, width))]
    for layer in range(layers):
        fused = ParameterSpec(f"{layer}.qkv", (3 * width, width), kind="per_matrix", blocks=blocks)
        shapes = {"proj": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
        specs += [fused]
        specs += [_matrix(f"{layer}.{name}", shape) for name, shape in shapes.items()]
        sizes = (3 * width, width, 4 * width, *[width] * 5)
        specs += [ParameterSpec(f"{layer}.{k}", (size,)) for k, size in enumerate(sizes)]
    return specs


def llama_8b() -> Specs:
    """Return the parameters of Llama 3, 8 B, which has 32 layers with grouped queries."""
    width, hidden, keys = 4_096, 14_336, 1_024
    specs = [ParameterSpec(name, (128_256, width)) for name in ("embedding", "output")]
    for layer in range(32):
        shapes = {
            **dict.fromkeys(("q", "o"), (width, width)),
            **dict.fromkeys(("k", "v"), (keys, width)),
            **dict.fromkeys(("gate", "up"), (hidden, width)),
            "down": (width, hidden),
        }
        specs += [_matrix(f"{layer}.{name}", shape) for name, shape in shapes.items()]
        specs += [ParameterSpec(f"{layer}.norm{k}", (width,)) for k in range(2)]
    return [*specs, ParameterSpec("norm", (width,))]


def _matrix(path: str, shape: tuple[int, ...]) -> ParameterSpec:
    return ParameterSpec(path, shape, kind="per_matrix")


SIZES = {"small": (12, 768, 12), "medium": (24, 1_024, 16), "XL": (48, 1_600, 25)}


def _gpt2_models() -> Iterator[tuple[str, Callable[[], Specs]]]:
    for name, (layers, width, heads) in SIZES.items():
        ways = {
            "fused": None,
            "Q, K, V": MatrixBlocks(row_blocks=3),
            "heads": MatrixBlocks(row_blocks=3 * heads),
        }
        for way, blocks in ways.items():
            yield f"GPT-2 {name}, {way}", partial(gpt2, layers, width, blocks)


MODELS: Mapping[str, Callable[[], Specs]] = {"Llama-8B": llama_8b, **dict(_gpt2_models())}
"""The parameters of each model, by name."""


def table() -> str:
    """Return the table: the largest rank over the mean and over the lower bound."""
    lines = [
        f"| model, {RANKS} ranks | time / mean | time / bound | bytes / mean | bytes / bound |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, build in MODELS.items():
        one = plan(build(), RANKS, "two_resource", rule).report(rule)
        numbers = [one.imbalance("flops"), one.makespan_over_bound]
        numbers += [one.imbalance(), one.memory_over_bound]
        lines.append(f"| {name} | {' | '.join(f'{number:.3f}' for number in numbers)} |")
    return "\n".join(lines)


def many_parameters() -> Specs:
    """Return matrices of a few shapes and vectors of many sizes, in alternation."""
    sides = (64, 256, 768, 1_024)
    return [
        _matrix(f"p{k}", (sides[k // 2 % 4], sides[k // 8 % 4]))
        if k % 2
        else ParameterSpec(f"p{k}", (100 + k * 37 % 9_973,))
        for k in range(MANY_PARAMETERS)
    ]


def seconds(rounds: int) -> float:
    """Return the least time of several plans of many parameters over many ranks."""
    specs, found = many_parameters(), []
    for _ in range(rounds + 1):  # the first plan builds tables that later plans reuse
        start = time.perf_counter()
        plan(specs, MANY_RANKS, "two_resource", rule)
        found.append(time.perf_counter() - start)
    return min(found[1:])


@click.command(context_settings={"show_default": True})
@click.option("--rounds", type=click.IntRange(min=1), default=5, help="Plans that are timed.")
def main(rounds: int) -> None:
    """Print how even the plans of real models are, and how long a large plan takes."""
    click.echo(table())
    click.echo(
        f"\n{MANY_PARAMETERS:,} parameters over {MANY_RANKS:,} ranks: {seconds(rounds):.2f} s"
    )


if __name__ == "__main__":
    main()
