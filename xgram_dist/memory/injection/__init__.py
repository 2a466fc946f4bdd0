"""Stage 3: how features enter the network."""
