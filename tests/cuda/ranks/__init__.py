"""Tests of ranks over NCCL. Several ranks may share a device: each one reports another host."""
