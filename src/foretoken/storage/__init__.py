"""Files: written whole or not at all, a cache of computed values, and the code that a kept result
depends on. Knows neither models nor tokens."""
