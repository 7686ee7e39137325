"""Inner optimizer of MuLoCo: Muon for the matrices of hidden layers, AdamW for all else."""

from functional_optim import Optimizer, adamw, labels, muon, partition, with_shape
from functional_optim.core.hyper import Scalar
from functional_optim.core.selectors import Where


def muloco_inner(
    lr: Scalar,
    weight_decay: Scalar = 0.0,
    *,
    not_hidden: Where,
    adjust_lr_fn: str | None = None,
) -> Optimizer:
    """Return the inner optimizer of MuLoCo, which is DiLoCo with Muon inside.

    With ``H`` and the outer rule of ``OUTER_SETTINGS["MuLoCo, Muon"]`` (30 inner steps, SGD with
    lr 0.9 and Nesterov's momentum 0.8), on every rank:

        x <- muon(x, g; momentum 0.9, not Nesterov's)    for matrices of hidden layers
        x <- adamw(x, g; betas 0.9 and 0.99)             for all other parameters

    These are the settings of the authors' published code, except ``lr`` and ``weight_decay``. The
    authors tune both for each model; for the smaller models, lr is about 0.04.

    Args:
        lr: the learning rate of both, a number >= 0, a 0-d tensor or a schedule.
        weight_decay: the decoupled decay of both, >= 0. The authors divide it by the number of
            ranks.
        not_hidden: selects the matrices outside of hidden layers, which AdamW steps: token
            embeddings, and the layer that makes logits. The same selectors work as for
            :meth:`~functional_optim.Optimizer.override`, such as
            ``matching("*embedding*", "head.*")``, which matches names of parameters.
        adjust_lr_fn: the factor for the shape of a matrix, as for :func:`~functional_optim.muon`.
            "match_rms_adamw" makes steps of AdamW's size, for an ``lr`` that was tuned for AdamW.
            The authors' factor is ``sqrt(rows / columns)``. None gives this factor too, but at
            least 1.

    Returns:
        A :func:`~functional_optim.partition` with the labels "matrices" and "rest":
        ``optimizer.replace(**{"rest.lr": 0.01})`` gives AdamW another learning rate.

    Raises:
        TypeError: ``not_hidden`` is neither a tuple of keys, a function nor a selector.
        ValueError: a value is outside the bounds above.

    Example::

        >>> import torch
        >>> import torch.distributed as dist
        >>> from benchmarks.outer_settings import OUTER_SETTINGS
        >>> from functional_optim import TorchOptimizer, matching
        >>> from hooks import PostLocalSGDOptimizer
        >>> from hooks.averaging import OuterModelAverager
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 3))
        >>> outer = OUTER_SETTINGS["MuLoCo, Muon"]
        >>> optimizer = PostLocalSGDOptimizer(
        ...     TorchOptimizer(
        ...         model.named_parameters(), muloco_inner(0.04, not_hidden=matching("0.*"))),
        ...     OuterModelAverager(model.parameters(), outer.optimizer(), outer.period))
        >>> model(torch.tensor([1, 2])).square().mean().backward()
        >>> optimizer.step()
        >>> ["momentum_buffer" in optimizer.state[param] for param in model.parameters()]
        [False, True, False]
        >>> dist.destroy_process_group()

    Reference:
        Therien et al., "MuLoCo: Muon is a practical inner optimizer for DiLoCo", arXiv 2505.23725,
        2025.
    """
    label_of = labels({"rest": not_hidden, "matrices": with_shape(ndim=2)}, default="rest")
    matrices = muon(
        lr=lr, weight_decay=weight_decay, momentum=0.9, nesterov=False, adjust_lr_fn=adjust_lr_fn
    )
    rest = adamw(lr=lr, betas=(0.9, 0.99), weight_decay=weight_decay)
    return partition({"matrices": matrices, "rest": rest}, label_of)
