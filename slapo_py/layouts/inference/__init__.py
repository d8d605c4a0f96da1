"""From the placements of parameters to those of all values and gradients, and the conversions between them."""
