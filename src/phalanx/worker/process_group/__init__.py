"""The process group of torch.distributed: forming, use and leaving."""
