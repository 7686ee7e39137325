"""Storage where a compiler runs, and from one process to another."""
