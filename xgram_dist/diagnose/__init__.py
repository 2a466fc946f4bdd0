"""The measurements of the paper, on a checkpoint or in the course of training."""
