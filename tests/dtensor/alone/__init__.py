"""The same with one rank, in this process."""
