"""Runs read back: numbers, tables, pictures and pages."""
