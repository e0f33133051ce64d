"""The maximum load of one leader: `phalanx bench scale`."""
