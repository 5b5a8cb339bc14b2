"""From logits to a verdict: laws, keyed draws, the rules that keep guesses, and the judges that
apply them. Knows no models and no rows."""
