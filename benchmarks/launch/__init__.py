"""How fast launchers start and end: `phalanx bench launch` and `phalanx bench exit`."""
