"""Table optimizers: they get the gradients of the rows that a step touched, and of no others."""
