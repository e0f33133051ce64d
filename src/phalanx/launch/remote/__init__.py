"""Nodes that are started from here: ssh and srun; and jobs that phalanx did not start."""
