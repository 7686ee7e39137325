"""Step hook on real processes over gloo, compared with DDP followed by torch.optim."""
