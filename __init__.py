"""Sidings."""
