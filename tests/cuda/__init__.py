"""What needs a CUDA device: left out, and said to be, where there is none."""
