"""The pictures of the documentation: `make pictures`."""
