"""--check-collectives: compares what ranks are about to call."""
