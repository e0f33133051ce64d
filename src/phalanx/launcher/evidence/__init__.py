"""What ranks report about themselves: parsed, and put into words."""
