"""What the probe costs, and how fast a stalled rank is diagnosed: `phalanx bench explain`."""
