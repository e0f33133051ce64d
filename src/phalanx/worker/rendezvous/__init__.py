"""How this process finds the others: identity, meeting point, roll call, device."""
