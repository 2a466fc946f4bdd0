"""The dense backbone, and where it takes what is injected."""
