"""Cases of the rules that precondition matrices on both sides."""

from hypothesis import strategies as st

from functional_optim import algorithms
from functional_optim.testing.case import BETAS, DECAY, EPS, FLAG, LR, Case, some

NAN = float("nan")

SHAMPOO_CASES: dict[str, Case] = {
    "kl_soap": Case(
        algorithms.kl_soap,
        options=some(
            lr=LR,
            betas=BETAS,
            shampoo_beta=st.sampled_from([0.0, 0.9]),
            eps=EPS,
            weight_decay=DECAY,
            precondition_frequency=st.sampled_from([1, 2]),
            max_precond_dim=st.sampled_from([0, 2, 100]),
            initial_eigenvalue=st.sampled_from([0.1, 1.0]),
            max_inverse_root=st.sampled_from([1, 4000]),
            correct_bias=FLAG,
        ),
        refused_here=(
            {"lr": -0.1},
            {"lr": NAN},
            {"betas": (1.0, 0.5)},
            {"shampoo_beta": 1.0},
            {"shampoo_beta": NAN},
            {"eps": -1.0},
            {"weight_decay": -1.0},
            {"precondition_frequency": 0},
            {"max_precond_dim": -1},
            {"initial_eigenvalue": 0.0},
            {"max_inverse_root": 0},
        ),
        matrices=True,
    ),
    "shampoo": Case(
        algorithms.shampoo,
        options=some(
            lr=LR,
            betas=st.sampled_from([(0.9, 1.0), (0.0, 0.9)]),
            eps=st.sampled_from([1e-12, 1e-3]),
            weight_decay=DECAY,
            block_size=st.sampled_from([1, 2, 1024]),
            precondition_frequency=st.sampled_from([1, 2]),
            start_preconditioning_step=st.sampled_from([1, 3]),
            exponent=st.sampled_from([0.25, 0.5]),
            graft=st.sampled_from([None, "sgd", "adagrad", "rmsprop", "adam"]),
            graft_beta=st.sampled_from([0.0, 0.9]),
            graft_eps=EPS,
            root_dtype=st.sampled_from([None, "float64"]),
            maximize=FLAG,
        ),
        refused_here=(
            {"lr": -0.1},
            {"lr": NAN},
            {"lr": float("inf")},
            {"betas": (1.0, 0.5)},
            {"betas": (0.5, 1.1)},
            {"betas": (0.5, NAN)},
            {"eps": -1.0},
            {"weight_decay": -1.0},
            {"block_size": 0},
            {"precondition_frequency": 0},
            {"start_preconditioning_step": 0},
            {"exponent": NAN},
            {"graft": "other"},
            {"graft_beta": 1.0},
            {"graft_eps": NAN},
            {"root_dtype": "float16"},
        ),
        matrices=True,
    ),
}
"""One case per algorithm, by the name of its constructor."""
