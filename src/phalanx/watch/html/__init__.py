"""The report of a run as one HTML file, and the comparison of runs."""
