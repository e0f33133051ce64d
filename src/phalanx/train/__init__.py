"""The training API: data, model, checkpoints, and the loop around them."""
