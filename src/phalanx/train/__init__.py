"""What a training script holds: data, model, checkpoints, and the loop around them."""
