"""Tests that replicas stay equal if ranks differ in compilers and compiled code."""

from functional_optim.kernels import EXECUTORS
from tests.choices import case, pairs
from tests.ranks import Job, run_ranks

from . import replicas

EXACT = [
    "reference",
    *(
        n
        for n, one in EXECUTORS.items()
        if one.exact and one.in_chunks(()) and n not in ("fused", "prefer_fused")
    ),
]
"""Executors whose steps equal the reference's bit for bit. On the CPU, prefer_fused is blocked."""
COMPILING = ("auto", "compiled")
COMPILERS = (["there", "none"], ["anew", "there"])


def test_every_exact_executor_is_tried() -> None:
    assert set(EXACT) == {"auto", "reference", "blocked", "compiled"}


def chosen() -> list[dict[str, object]]:
    """Return the cases; the reference of each kind of training comes first."""
    trained = [
        {"front_end": front_end, "optimizer": optimizer}
        for front_end in ("hook", "class")
        for optimizer in replicas.OPTIMIZERS
        if front_end == "class" or optimizer != "clipped"  # no total before the last bucket
    ]
    references = [{**one, "executor": "reference", "compilers": COMPILERS[0]} for one in trained]
    others = pairs(
        trained=trained, executor=[one for one in EXACT if one != "reference"], compilers=COMPILERS
    )
    return [*references, *({**one.pop("trained"), **one} for one in others)]


def test_replicas_are_equal() -> None:
    """Parameters are the same on every rank, and equal those of the reference executor."""
    cases = chosen()
    job = Job(replicas.train_all, {"cases": cases})
    ranks = [one.result() for one in run_ranks({"all": job}, ranks=2, seconds=300)["all"]]
    references: dict[tuple[object, ...], str] = {}
    for one, *found in zip(cases, *ranks, strict=True):
        kind = one["front_end"], one["optimizer"]
        wanted = references.setdefault(kind, found[0]["digest"])
        with case(**one):
            assert [seen["digest"] for seen in found] == [wanted, wanted]
            if one["executor"] in COMPILING:
                lacking = [compiler == "none" for compiler in one["compilers"]]
                assert [not seen["loops"] for seen in found] == lacking
                assert [len(seen["warned"]) for seen in found] == list(map(int, lacking))
    assert len(set(references.values())) > 2
