"""One file a verb; the only place that composes rooms."""
