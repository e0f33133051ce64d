"""Output of workers: captured in log files, shown on the console."""
