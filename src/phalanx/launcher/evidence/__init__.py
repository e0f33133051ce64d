"""What ranks report about themselves: parsed and described."""
