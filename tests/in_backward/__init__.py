"""Optimizers in backward: in one process, and under DistributedDataParallel."""
