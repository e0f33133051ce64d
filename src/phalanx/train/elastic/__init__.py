"""Training through failures: regrouping, and the state that is handed over to new ranks."""
