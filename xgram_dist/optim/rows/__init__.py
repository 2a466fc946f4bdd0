"""Optimizers of tables: they get the gradients of the rows that a step hit, and of no others."""
