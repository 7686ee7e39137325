"""Claims of papers about training with few means, tested on a small model."""
