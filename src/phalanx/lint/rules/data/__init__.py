"""Rules about data: how samples are divided among the ranks."""
