"""What we are compared with, where torch.optim has nothing: usual classes, and a loop in C."""
