"""A trained model at work: opened from a checkpoint of any layout, its tables mapped from the files."""
