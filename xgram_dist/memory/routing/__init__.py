"""Stage 1: which rows a token reads, decided once from token frequencies."""
