"""Who may run now."""
