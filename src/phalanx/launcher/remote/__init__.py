"""Other hosts: nodes started through ssh and srun, and jobs that phalanx did not start."""
