"""Drafters that others have released: read whatever their format, started from, repaired and written back."""
