"""What is to be seen of a run, from its events alone: in the terminal, in a browser, as a file, as metrics."""
