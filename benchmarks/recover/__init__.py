"""The cost of the death of a rank: `phalanx bench recover`."""
