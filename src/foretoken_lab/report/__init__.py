"""A report of recipes: measured and resumed, then shown as a page, Markdown and JSON."""
