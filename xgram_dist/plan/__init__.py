"""What a recipe costs, computed from its numbers alone; nothing is allocated."""
