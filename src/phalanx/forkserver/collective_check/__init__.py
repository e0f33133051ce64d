"""--check-collectives: compare what ranks are about to call."""
