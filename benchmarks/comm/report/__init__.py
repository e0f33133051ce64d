"""Reports of the results: tables, plots, targets, and the comparison with an earlier run."""
