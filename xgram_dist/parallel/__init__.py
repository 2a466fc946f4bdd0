"""Ranks, devices and how a run is started on several ranks."""
