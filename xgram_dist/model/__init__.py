"""The dense backbone, the injection sites, and the memory methods."""
