"""Identities of wrappers that act after a rule."""

import pytest
import torch
from torch import Tensor

import functional_optim as fo
from tests.agreement.transform_runs import STEPS, largest_logits, problem, run


def test_norms_stay_what_they_were() -> None:
    for shape in ((4, 6), (3, 2, 5, 5)):
        param, grads = problem(shape)
        by_row, _ = run(fo.chain(fo.adamw(0.1), fo.constrain_norm(rows=True)), param, grads)
        torch.testing.assert_close(by_row.flatten(1).norm(dim=1), param.flatten(1).norm(dim=1))
        whole, _ = run(fo.chain(fo.adamw(0.1), fo.constrain_norm()), param, grads)
        torch.testing.assert_close(whole.norm(), param.norm())
        ball, _ = run(fo.chain(fo.adamw(0.1), fo.constrain_norm(0.5)), param, grads)
        assert float(ball.norm()) == pytest.approx(0.5, rel=1e-5)
    in_16_bits, _ = run(
        fo.chain(fo.sgd(0.1), fo.constrain_norm()), param.bfloat16(), [g.bfloat16() for g in grads]
    )
    assert float(in_16_bits.float().norm()) == pytest.approx(float(param.norm()), rel=2e-3)


def test_vectors_and_zeros_are_left_alone_by_a_norm_constraint() -> None:
    for start in (torch.ones(5), torch.tensor(2.0), torch.zeros(3, 4)):
        grads = [torch.full_like(start, 0.5)] * 3
        for rows in (False, True):
            found, _ = run(fo.chain(fo.sgd(0.1), fo.constrain_norm(rows=rows)), start, grads)
            assert torch.equal(found, run(fo.sgd(0.1), start, grads)[0])


def test_an_average_of_a_constant_is_that_constant() -> None:
    param, _ = problem()
    still = [torch.zeros_like(param)] * STEPS
    for link in (fo.swa(3), fo.swa(1, 4), fo.tail_ema(0.9, 4)):
        optimizer = fo.chain(fo.sgd(0.1), link)
        assert torch.equal(optimizer.view(*run(optimizer, param, still)), param)


def test_an_average_that_starts_later_is_the_parameter() -> None:
    param, grads = problem()
    for link in (fo.swa(STEPS), fo.swa(STEPS + 5, 2), fo.tail_ema(0.9, STEPS)):
        optimizer = fo.chain(fo.sgd(0.1), link)
        found, state = run(optimizer, param, grads)
        assert torch.equal(optimizer.view(found, state), found)


def test_a_front_end_puts_an_average_into_a_model() -> None:
    module = torch.nn.Linear(6, 4)
    optimizer = fo.TorchOptimizer(module.named_parameters(), fo.chain(fo.sgd(0.1), fo.swa(2, 2)))
    seen = []
    for _ in range(4):
        for param in module.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        seen.append(module.weight.detach().clone())
    with optimizer.averaged(module):
        torch.testing.assert_close(module.weight.detach(), (seen[1] + seen[3]) / 2)
    assert torch.equal(module.weight, seen[3])


def test_logits_that_are_small_or_not_given_change_nothing() -> None:
    param, grads = problem()
    optimizer = fo.chain(fo.sgd(0.1), fo.qk_clip(30.0))
    plain, _ = run(fo.sgd(0.1), param, grads)
    assert torch.equal(run(optimizer, param, grads)[0], plain)
    assert torch.equal(run(optimizer, param, grads, max_logit=largest_logits)[0], plain)


def test_only_the_projections_that_are_named_are_clipped() -> None:
    """``qk_clip`` changes only the named projections, as in MuonClip.

    Muon steps the projections, and AdamW steps the other parameters.
    """
    param, grads = problem()
    parts = {"muon": fo.muon(0.02), "adamw": fo.adamw(0.1)}
    rule = fo.partition(parts, fo.labels({"muon": fo.with_shape(ndim=2)}, default="adamw"))
    clip = fo.masked(fo.qk_clip(20.0), fo.matching("query") | fo.matching("key"))
    tree = {"query": param, "key": -param, "value": param.clone(), "bias": param[0].clone()}
    given = {name: grads[0] if one.dim() == 2 else grads[0][0] for name, one in tree.items()}
    logits = torch.tensor([10.0, 10.0, 80.0, 80.0])[:, None].expand_as(param)
    extra = {"max_logit": {"query": logits, "key": logits, "value": None, "bias": None}}
    plain, _ = rule.update(tree, given, rule.init(tree))
    optimizer = fo.chain(rule, clip)
    made, _ = optimizer.update(tree, given, optimizer.init(tree), extra=extra)
    for name in ("query", "key"):
        assert torch.equal(made[name][:2], plain[name][:2])
        torch.testing.assert_close(made[name][2:], plain[name][2:] / 2)
    for name in ("value", "bias"):
        assert torch.equal(made[name], plain[name])


def test_clipped_projections_give_logits_of_tau() -> None:
    """Clipping query and key limits the logits to tau: together they take the whole factor."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 6, generator=generator, dtype=torch.float64)
    heads = {k: torch.randn(4, 6, generator=generator, dtype=torch.float64) for k in "qk"}

    def logits(weights: dict[str, Tensor]) -> Tensor:
        q, k = ((x @ weights[name].T).unflatten(1, (2, 2)) for name in "qk")
        return torch.einsum("ihd,jhd->hij", q, k).amax((1, 2))

    before = logits(heads)
    tau = float(before.min() + before.max()) / 2  # tau is between the heads, so one head is clipped
    optimizer = fo.chain(fo.sgd(0.0), fo.qk_clip(tau))
    given = before.repeat_interleave(2)[:, None].expand(4, 6)
    made, _ = optimizer.update(
        heads, heads, optimizer.init(heads), extra={"max_logit": {"q": given, "k": given}}
    )
    torch.testing.assert_close(logits(made), before.clamp(max=tau))
