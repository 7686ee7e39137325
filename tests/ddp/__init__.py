"""The step hook on real processes: N ranks over gloo, compared with DDP followed by torch.optim."""
