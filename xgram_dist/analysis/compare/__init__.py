"""Recipes trained on several seeds, side by side."""
