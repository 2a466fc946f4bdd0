"""Schedule, joint clipping, and the optimizers of backbone and tables."""
