"""The paper's measurements, on a checkpoint or during training."""
