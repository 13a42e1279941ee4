"""What people start: the flows, and the `virnuc` command."""
