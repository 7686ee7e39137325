"""``python -m benchmarks.training``, from the root of the repository."""

from benchmarks.training.command import convergence

if __name__ == "__main__":
    convergence(prog_name="make convergence")
