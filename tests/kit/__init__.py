"""What the tests stand on: leak checks around every test, and the real commands run as a user runs them."""
