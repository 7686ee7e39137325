"""SOAP written out in float64, to compare other implementations with."""

from typing import Any

import torch
from torch import Tensor


def soap_formula(
    start: Tensor, grads: list[Tensor], c: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return parameter, m and v by algorithm 3 of Vyas et al., with loops over columns."""
    lr, (b1, b2), bs, decay = c["lr"], c["betas"], c["shampoo_beta"], c["weight_decay"]
    p, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    sides = [torch.zeros(size, size).double() for size in start.shape]
    bases = [torch.eye(size).double() for size in start.shape]
    turned = [side for side in (0, 1) if start.shape[side] <= c["max_precond_dim"]]
    for number, g in enumerate(grads):
        p = p * (1 - lr * decay)
        if number:
            seen = bases[0].T @ g @ bases[1]
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * seen**2
            inside = bases[0].T @ (m / (1 - b1**number)) @ bases[1]
            ratio = inside / ((v / (1 - b2**number)).sqrt() + c["eps"])
            p = p - lr * bases[0] @ ratio @ bases[1].T
        sides = [bs * sides[0] + (1 - bs) * g @ g.T, bs * sides[1] + (1 - bs) * g.T @ g]
        if number == 0:
            for side in turned:
                sizes, vectors = torch.linalg.eigh(sides[side])
                bases[side] = vectors[:, sizes.argsort(descending=True)]
        elif number % c["precondition_frequency"] == 0:
            for side in turned:
                columns = bases[side].unbind(1)
                sizes = [float(q @ sides[side] @ q) for q in columns]
                places = sorted(range(len(sizes)), key=lambda k, of=sizes: -of[k])
                v = v[places] if side == 0 else v[:, places]
                basis = torch.stack([columns[k] for k in places], 1)
                bases[side] = torch.linalg.qr(sides[side] @ basis).Q
    return p, m, v
