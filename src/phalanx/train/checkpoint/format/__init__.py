"""The files of a checkpoint: manifest, tensors, integrity."""
