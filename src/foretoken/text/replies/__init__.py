"""Replies of chat models: thoughts, calls of functions, and what is for the reader."""
