"""The cost of training with phalanx: `phalanx bench step` and `phalanx bench checkpoint`."""
