"""`phalanx.spawn`: start ranks from a Python process, without a run folder or an agent."""
