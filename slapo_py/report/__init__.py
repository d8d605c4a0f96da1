"""What a person reads: trees, tables, plots."""
