"""Terminal handling: modes, keys, styled text and output."""
