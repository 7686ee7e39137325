"""Tests that compile: TorchScript, torch.compile, new processes."""
