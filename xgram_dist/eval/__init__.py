"""What a trained model is worth: lm-evaluation-harness on checkpoints and in training, perplexity by frequency."""
