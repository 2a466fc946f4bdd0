"""What runs and checkpoints show: the paper's measurements, recipes side by side, reports."""
