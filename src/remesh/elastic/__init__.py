"""The control plane: jobs that go on while machines die, leave and join."""
