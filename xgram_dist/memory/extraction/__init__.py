"""Stage 2: from retrieved rows to local n-gram features."""
