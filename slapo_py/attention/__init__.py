"""Attention by another backend, through the registry of transformers: where it can go, and a function of the user."""
