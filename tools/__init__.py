"""Tools that generate parts of the repository: pages of the reference. Not in the wheel."""
