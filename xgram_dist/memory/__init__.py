"""Token-indexed tables: routing, storage, exchange, extraction, injection."""
