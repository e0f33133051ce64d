def greet(rank):
    return f"hello from {__file__} to {rank}"
