"""Requests that come at any time, and what becomes of each of them, event by event."""
