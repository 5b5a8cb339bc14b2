"""Storage: files written atomically, and a cache of computed values. Depends on neither models nor
tokens."""
