"""A terminal to draw on: its modes, its keys, styled text, and what is written to it."""
