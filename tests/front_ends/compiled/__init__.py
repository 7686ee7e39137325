"""What compiles: TorchScript, torch.compile, new processes."""
