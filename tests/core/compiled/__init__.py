"""Tests of the core that compile something: TorchScript, torch.compile, torch.export."""
