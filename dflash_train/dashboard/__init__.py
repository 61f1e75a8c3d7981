"""A run's folder as one page: read, judged, drawn."""
