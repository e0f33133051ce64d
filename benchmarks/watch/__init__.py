"""The cost of viewers for a run, and how fast they show it: `phalanx bench watch`."""
