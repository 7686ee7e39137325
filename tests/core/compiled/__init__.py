"""Tests of the core for which something is compiled: TorchScript, torch.compile, torch.export."""
