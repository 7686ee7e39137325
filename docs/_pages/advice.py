"""Advice on each algorithm: when to use it, and when not; an algorithm may have none."""

from typing import NamedTuple


class Advice(NamedTuple):
    """Two sentences or a few."""

    use: str
    avoid: str


MATRICES = (
    "for vectors, embeddings and the output layer, which need another optimizer such as `adamw`; "
    "use `partition`"
)

ADVICE: dict[str, Advice] = {
    "adabelief": Advice(
        "You use Adam, and gradients change little from step to step: it then takes longer steps.",
        "with an `eps` taken from Adam; AdaBelief's default is far smaller and matters more.",
    ),
    "adabound": Advice(
        "You train a network for images, and want Adam's start and SGD's end.",
        "for transformers: the bounds turn the end of training into SGD.",
    ),
    "adadelta": Advice(
        "You reproduce an experiment that used it.",
        "for new work: `adamw` reaches lower losses and has a learning rate that you can schedule.",
    ),
    "adafactor": Advice(
        "Memory is short: the average of squares of a matrix takes one row and one column.",
        "if 8-bit state fits into memory: `stored(adamw(...), state='int8')` keeps Adam's steps.",
    ),
    "adagrad": Advice(
        "Gradients are sparse, and the data does not change: recommenders and linear models.",
        "for long runs of deep networks: the sum of squares only grows, and steps vanish.",
    ),
    "adahessian": Advice(
        "You can afford two more gradients a step, and want curvature element by element.",
        "if the loss cannot be differentiated twice, as with some fused attention kernels.",
    ),
    "adam": Advice(
        "You reproduce an experiment with coupled L2 regularization, or use no decay.",
        "with weight decay: `adamw` decouples the decay from the scale of the gradient.",
    ),
    "adam_mini": Advice(
        "Memory is short, and the blocks of the model are known: one number replaces a block of v.",
        "if you cannot name the blocks of heads and rows: wrong blocks make training unstable.",
    ),
    "adamax": Advice(
        "Gradients have rare outliers: its scale follows the largest recent gradient.",
        "for new work without such gradients: `adamw` is as good and better known.",
    ),
    "adamw": Advice(
        "Use it first. Defaults work for most transformers, and results are easy to compare.",
        "if memory is short (8 bytes of state per parameter), or if matrices dominate and you can "
        "tune a second learning rate; then try `muon` or `soap`.",
    ),
    "adan": Advice(
        "You train vision models with large learning rates and batches.",
        "if memory is short: it keeps four tensors of the parameter's size.",
    ),
    "ademamix": Advice(
        "The run has many thousands of steps: a slow average remembers old gradients.",
        "for short runs: the slow average and its warm-up need about `1 / (1 - beta3)` steps.",
    ),
    "adopt": Advice(
        "You want convergence for any `beta2`, or `adam` diverges with a large one.",
        "if you need torch's Adam numbers: the order of its operations differs.",
    ),
    "asgd": Advice(
        "The problem is convex and noisy: the average of the iterates is the answer.",
        "for deep networks: `ema` or `swa` behind any optimizer do the same with more control.",
    ),
    "came": Advice(
        "You use Adafactor, and want a more stable step for nearly the same memory.",
        "if memory is no concern.",
    ),
    "dadapt_adam": Advice(
        "You cannot tune a learning rate.",
        "if `prodigy` is an option: it is the successor, and grows faster to the right step.",
    ),
    "dadapt_sgd": Advice(
        "You cannot tune a learning rate, and the model trains well with SGD.",
        "for transformers, which SGD trains badly.",
    ),
    "dion": Advice(
        "Matrices are sharded over many ranks: a low rank makes orthogonal steps cheap to send.",
        f"on one device, where `muon` is simpler; and {MATRICES}.",
    ),
    "dog": Advice(
        "You fine-tune, and cannot tune a learning rate.",
        "for training from scratch without an average of the parameters; the paper needs one.",
    ),
    "ftrl": Advice(
        "You train a sparse linear model online, and want exact zeros by `l1`.",
        "for deep networks.",
    ),
    "galore_adamw": Advice(
        "Memory is short, and matrices are large: AdamW's state has a low rank.",
        "if 8-bit state fits into memory: `stored(adamw(...), state='int8')` loses less.",
    ),
    "kl_soap": Advice(
        "You use `soap`, and want factors that fit the gradients' covariance in the KL sense.",
        f"if a step must be cheap; and {MATRICES}.",
    ),
    "lamb": Advice(
        "The batch is very large (thousands of sequences), as in pre-training of BERT.",
        "for small batches: the trust ratio adds nothing there.",
    ),
    "lars": Advice(
        "The batch is very large, and the network is convolutional.",
        "for transformers: use `lamb` or `adamw`.",
    ),
    "laprop": Advice(
        "`adam` is unstable with a small `beta2`: LaProp normalizes before it averages.",
        "if you need results that compare with Adam's at the same learning rate.",
    ),
    "lbfgs": Advice(
        "The problem is small, smooth and deterministic: physics-informed networks, fits.",
        "with mini-batches: differences of gradients are then mostly noise.",
    ),
    "ldog": Advice(
        "You fine-tune, cannot tune a learning rate, and layers differ in size.",
        "for training from scratch without an average of the parameters; the paper needs one.",
    ),
    "lion": Advice(
        "Memory is short: one tensor of state. Batches are large.",
        "with AdamW's rate: use a third to a tenth of it, and three to ten times the decay.",
    ),
    "muon": Advice(
        "Most parameters are matrices of hidden layers, and you train from scratch.",
        f"{MATRICES}; and for fine-tuning of models that Adam trained.",
    ),
    "nadam": Advice(
        "You use Adam, and want Nesterov's look-ahead; gains are small and come early.",
        "if you compare with published AdamW results.",
    ),
    "normuon": Advice(
        "You use `muon`, and rows of the update have very different lengths.",
        f"{MATRICES}.",
    ),
    "novograd": Advice(
        "You train speech models: one number per tensor replaces the average of squares.",
        "if elements of one tensor have gradients of very different sizes, as embeddings do.",
    ),
    "prodigy": Advice(
        "You cannot tune a learning rate; leave `lr` at 1 and add a cosine schedule.",
        "if memory is short (16 bytes of state per parameter; `slice_p` makes it fewer).",
    ),
    "kron": Advice(
        "You want a preconditioner without eigenvectors or roots, and matrices of any shape.",
        "if a run must not depend on random numbers: it probes with random vectors.",
    ),
    "qhadam": Advice(
        "You want one rule that contains Adam, NAdam and RMSprop, and can tune `nus`.",
        "without tuning: with `nus=(1, 1)` it is Adam.",
    ),
    "qhm": Advice(
        "You use SGD with a large momentum: it averages the plain gradient in.",
        "for transformers, which SGD trains badly.",
    ),
    "radam": Advice(
        "You want Adam without a warm-up of the learning rate.",
        "if you have a warm-up already: it does the same.",
    ),
    "rmsprop": Advice(
        "You train a reinforcement-learning agent, or reproduce an old recipe.",
        "for transformers: Adam's momentum and bias correction help there.",
    ),
    "rowwise_adagrad": Advice(
        "Embedding tables are huge: one number of state per row.",
        "for anything but embeddings.",
    ),
    "rprop": Advice(
        "Gradients are exact: full batches on a small problem.",
        "with mini-batches: it reads the sign of one gradient as if it were exact.",
    ),
    "schedule_free_adamw": Advice(
        "You do not know how long the run will be, or do not want a schedule.",
        "if you forget that evaluation needs `view` (or `averaged`): the trained point is not the "
        "answer.",
    ),
    "schedule_free_sgd": Advice(
        "You would use SGD with a schedule, and do not know how long the run will be.",
        "for transformers; and see `schedule_free_adamw` on evaluation.",
    ),
    "scion": Advice(
        "You want a norm for each layer, and learning rates that carry over from small models.",
        "if layers cannot be given norms one by one.",
    ),
    "sgd": Advice(
        "You train a convolutional network and can tune the learning rate; use momentum 0.9.",
        "for transformers and recurrent networks: their gradients need a scale per element.",
    ),
    "shampoo": Advice(
        "Steps are few and expensive, and second-order information pays for itself.",
        "if you can use `soap`: it needs roots of matrices no more, and is easier to tune.",
    ),
    "sign_sgd": Advice(
        "Gradients travel over a slow link as one bit an element.",
        "without momentum on noisy gradients: use `signum` or `lion`.",
    ),
    "signum": Advice(
        "Memory or the link is short: one tensor of state, and steps of one size.",
        "if `lion` is an option: its look-ahead is nearly always better.",
    ),
    "soap": Advice(
        "You want the fewest steps, and can afford products of matrices in each.",
        f"if sides are longer than `max_precond_dim`; and {MATRICES}.",
    ),
    "sophia": Advice(
        "You pre-train a language model, and can estimate the Hessian's diagonal.",
        "if the loss cannot be differentiated twice, or if `gamma` cannot be tuned.",
    ),
    "sparse_adam": Advice(
        "Gradients are sparse, and only the rows that they store are to change.",
        "with dense gradients, which it refuses.",
    ),
    "stable_adamw": Advice(
        "AdamW's loss has spikes: updates are clipped by their own size, without a threshold.",
        "if you already clip gradients and see no spikes.",
    ),
    "yogi": Advice(
        "Gradients are sparse or change in size: v grows and shrinks by bounded steps.",
        "if `adamw` is stable: Yogi then gains nothing.",
    ),
}

DEFAULTS: dict[str, str] = {
    "adahessian": "The defaults are those of the authors' program for language models.\n",
    "ftrl": "`beta=1` is the paper's advice; the paper has no default of `lr`.\n",
    "lamb": "The defaults are those of the paper for BERT.\n",
    "lars": "`trust_coefficient=0.001` and `momentum=0.9` are the paper's.\n",
    "lion": "The defaults are those of the authors' program.\n",
    "prodigy": "The defaults are those of the authors' package prodigyopt.\n",
    "qhm": "`momentum=0.999` and `nu=0.7` are the paper's advice.\n",
    "rowwise_adagrad": "The defaults are those of FBGEMM's row-wise Adagrad.\n",
    "schedule_free_adamw": "The defaults are those of the authors' package schedulefree.\n",
    "schedule_free_sgd": "The defaults are those of the authors' package schedulefree.\n",
    "soap": "The defaults are those of the authors' program.\n",
    "sophia": "`betas`, `gamma` and `weight_decay` are the paper's for Sophia-H.\n",
}
"""Sources of defaults that the files of the algorithms do not name."""
