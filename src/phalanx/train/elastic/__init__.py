"""Training through failures: regrouping, and the state that goes to new ranks."""
