"""What one operation does to placements: its labels, its signatures, where a split dim lies in its result."""
