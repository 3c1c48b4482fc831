"""Single-variable experiments on a failing configuration: their table, their rules, their verdict."""
