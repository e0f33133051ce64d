"""What one leader can bear: `phalanx bench scale`."""
