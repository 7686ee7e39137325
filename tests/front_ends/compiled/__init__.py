"""Tests that compile with TorchScript or torch.compile, or that start new processes."""
