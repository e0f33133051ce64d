"""The cost of the gate in front of the store: `phalanx bench store`."""
