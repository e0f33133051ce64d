"""What the gate in front of the store costs: `phalanx bench store`."""
