"""Endpoints for operators and probes: health, status, metrics, and the list of models."""
