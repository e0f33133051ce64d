"""The leader of the control plane: admits members, keeps track of them, and assigns ranks."""
