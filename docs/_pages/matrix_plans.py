"""The page of plans of matrices, computed from the shapes of models."""

from benchmarks.matrix_plans import MANY_PARAMETERS, MANY_RANKS, RANKS, table

HEAD = """# Plans of real models

The policy `two_resource` for Muon on hidden matrices and AdamW on all other parameters, over
{ranks} ranks. The page is computed from shapes, without a process group. *Time* is the
floating-point operations of a step, and *bytes* are those of parameters, gradients and state. Each
number is the largest rank divided by the mean of all ranks, or by the lower bound.

The lower bound holds for every plan that leaves matrices whole. A ratio of 1 to the bound means
that no plan is better. [Plan matrices](how-to/plan-matrices.md) says how to read the table and how
to declare blocks.
"""

TAIL = """
The target for Llama-8B is met: at most 1.06 of the mean in time, and 1.00 in bytes. The target for
GPT-2 is 1.10 of the mean in both. GPT-2 medium and XL meet it with Q, K and V declared.

GPT-2 small **misses** 1.10 in time, and no plan can meet it: one matrix of its MLP takes at least
1.6 times the mean time of a rank, and a matrix has one owner. The plan reaches the lower bound.
Heads need far fewer operations than whole matrices. So they lower the mean but not the largest
rank, and the ratio to the mean rises. For that reason GPT-2 medium and XL **miss** 1.10 with heads.

`python -m benchmarks.matrix_plans` prints the table and the time of a plan of {parameters:,}
parameters over {many:,} ranks. The least of five took less than half a second of
one core.
"""


def page() -> str:
    """Return the text of the page."""
    tail = TAIL.format(ranks=RANKS, parameters=MANY_PARAMETERS, many=MANY_RANKS)
    return f"{HEAD.format(ranks=RANKS)}\n{table()}\n{tail}"
