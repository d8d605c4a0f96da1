"""What a schedule does wrong, said with the step that is behind it and the line that mends it."""
