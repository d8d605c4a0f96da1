"""Another module in the place of an old one: what fits, what moves on, and the state under the old names."""
