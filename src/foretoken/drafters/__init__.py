"""Drafters: objects that propose draft tokens. Each sampled draft token comes with the distribution
q from which it was sampled. Drafters do not depend on the acceptance method."""
