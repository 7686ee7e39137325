"""``python -m benchmarks.claims``, from the root of the repository."""

from benchmarks.claims.command import claims

if __name__ == "__main__":
    claims(prog_name="make claims")
