"""Libraries that train with a torch.optim.Optimizer, with one of ours: the real ones, offline."""
