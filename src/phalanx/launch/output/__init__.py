"""What workers write: captured in log files, shown on the console."""
