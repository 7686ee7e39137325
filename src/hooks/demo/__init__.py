"""Demo: a small transformer trained by the step hook and by torch, with a comparison."""
