"""A local module of train.py. The fault "edit" changes the copy on the disk."""

LEARNING_RATE = 1e-2
