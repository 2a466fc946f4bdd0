"""Learning-rate schedule, joint gradient clipping, AdamW of the backbone."""
