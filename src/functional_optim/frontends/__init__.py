"""Front-ends with torch's interfaces: optimizers, functional optimizers, and their checkpoints."""
