"""Replies of chat models: where they think, where they call functions, and what is for the reader."""
