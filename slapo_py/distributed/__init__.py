"""Meshes and collectives."""
