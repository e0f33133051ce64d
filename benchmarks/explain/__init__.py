"""The cost of the probe, and the time to diagnose a stalled rank: `phalanx bench explain`."""
