"""What training with phalanx costs: `phalanx bench step` and `phalanx bench checkpoint`."""
