"""Metrics, logs, traces, health and the status page."""
