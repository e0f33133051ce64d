"""The process group of torch.distributed, and how it is left."""
