"""Rules about processes: how ranks start, find each other and end."""
