"""The test kit: leak checks around every test, and the real commands run like by a user."""
