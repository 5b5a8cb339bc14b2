"""Replies of chat models: reasoning, tool calls, and text for the user."""
