"""``python -m benchmarks``, from the root of the repository."""

from benchmarks.command import bench

if __name__ == "__main__":
    bench(prog_name="make bench")
