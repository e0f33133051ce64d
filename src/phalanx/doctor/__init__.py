"""What is wrong with a machine, or between machines: one check a file, each reads facts and judges them apart."""
