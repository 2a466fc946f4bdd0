"""Documents to tokens to batches. The only package that imports `streaming`."""
