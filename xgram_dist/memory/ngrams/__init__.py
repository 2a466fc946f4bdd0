"""Keys that are n-grams: which row a position reads, by the tokens that end there."""
