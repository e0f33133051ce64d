"""What viewers cost a run, and how fast they show it: `phalanx bench watch`."""
