"""What the death of a rank costs: `phalanx bench recover`."""
