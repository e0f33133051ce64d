"""Charts as text and SVG."""
