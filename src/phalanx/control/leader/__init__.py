"""The leader of the control plane: who may join, who has joined, and which ranks each member gets."""
